"""`torchrun -m paceline.join script.py`: training in the processes that torchrun has started.

Importing this module has no side effects.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line in a process that torchrun has started."""
    import typer

    from .cli.console import run_app
    from .cli.run import TORCHRUN, RunCommand, scheduled_join

    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command(
        cls=RunCommand,
        help=TORCHRUN,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    )(scheduled_join("torchrun"))
    run_app(app)


if __name__ == "__main__":
    main()
