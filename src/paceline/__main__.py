"""The entry point of `python -m paceline`, which is equivalent to the `paceline` command."""

from .cli import main

main()
