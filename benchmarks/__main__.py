"""Entry point of `python -m benchmarks`."""

from .commands import main

if __name__ == "__main__":
    main()
