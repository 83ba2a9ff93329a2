"""Entry point of `python -m reproductions`."""

from .commands import main

if __name__ == "__main__":
    main()
