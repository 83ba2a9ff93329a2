"""`python -m paceline` is `paceline`."""

from .cli import main

main()
