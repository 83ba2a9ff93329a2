"""The entry point of `python -m paceline`, which is the same as the `paceline` command."""

from .cli import main

main()
