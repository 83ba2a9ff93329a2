"""Entry point of `python -m benchmarks`."""

if __name__ == "__main__":  # processes that are spawned import this module, too
    from .commands import main

    main()
