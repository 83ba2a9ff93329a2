"""Draw the pictures of `docs/how-to/simulate.md`: `python docs/make_rehearse.py`. This takes about a minute."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from paceline.lab.clusters import load_cluster
from paceline.lab.comparison import compare, explore_models, train_and_compare
from paceline.lab.ranking import EVERY_MODEL

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"
CLUSTER = HERE.parent / "examples" / "cluster.toml"
SCRIPT = HERE.parent / "examples" / "digits.py"
TRAINED = ("bsp", "asp", "ssp:staleness=3", "elastic-bsp:lookahead=15")
LOOKAHEADS = (5, 10, 20, 40, 80, 160, 320, 480)


def quiet(done: int, of: int, what: str) -> None:
    """Ignore the progress reports of a simulation."""


def main() -> int:
    """Draw all pictures, using the functions behind the commands on the page. Return the exit code."""
    cluster, console = load_cluster(str(CLUSTER)), Console(quiet=True)
    with TemporaryDirectory() as folder:
        out = Path(folder)
        compare(
            cluster,
            EVERY_MODEL,
            iterations=100,
            seed=0,
            shards=None,
            data=None,
            out=out,
            console=console,
            tell=quiet,
        )
        explore_models(
            cluster,
            ["elastic-bsp"],
            "lookahead",
            LOOKAHEADS,
            iterations=100,
            seed=0,
            shards=None,
            out=out,
            console=console,
            tell=quiet,
        )
        train_and_compare(
            cluster,
            TRAINED,
            SCRIPT,
            ["--epochs", "20"],
            seed=0,
            shards=None,
            out=out,
            console=console,
            tell=quiet,
        )
        for name in ("ranking", "sweep", "training"):
            shutil.copy(out / f"{name}.png", PICTURES / f"rehearse-{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
