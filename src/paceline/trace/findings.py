"""Describes in sentences what was wrong with a run, or could be better, and what would help.

Pushes that were never applied, and updates that are missing, come first, because a run with such pushes or updates
trains less than its speed suggests. The other sentences are about time that the workers lost (see `look.causes`), and
about unusual clipping. If workers clip their own gradients, this is always said, because it changes the result.

Remedies are ordered by their effect on the result of training (see `sync.model`). Remedies that do not change the
result come first. Models with stale gradients come last, and only with the advice to check the accuracy.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ..core.lease import DataOrder, Split
from .measures import Measures, missing_updates, unapplied_pushes

OPTION = re.compile(r"--(\w+) ([\w-]+(?:[:=,]\w+)*)")

DISTRIBUTE = (
    "The script decides how many iterations each worker makes. If this is a fixed number, the run lasts as long as "
    "its slowest worker under every sync model. If the script distributes its data with paceline.distribute(loader), "
    "faster workers can use more of the data."
)

CLIP = (
    "To clip the joint gradient, call optimizer.clip_grad_norm(max_norm) between backward() and step() instead; with "
    "Accelerate, accelerator.clip_grad_norm_(...); with Fabric, fabric.clip_gradients(...)."
)


class Handout(NamedTuple):
    """The way in which the data of a run was handed out to its workers. The possible remedies depend on it.

    Attributes:
        split: the split of the loader from which the most samples were used, as in `paceline.distribute`; None if the
            script distributed no loader.
        balanced: True if the loader's batches were balanced. Balanced batches are then not suggested.
        divisible: True if the loader's batches can be balanced.
    """

    split: Split | None = None
    balanced: bool = False
    divisible: bool = False

    @property
    def may_balance(self) -> bool:
        """True if the user can try balanced batches."""
        return self.divisible and not self.balanced

    @classmethod
    def of(cls, order: DataOrder, *, asked: bool) -> Handout:
        """Return how data in this order was handed out.

        Args:
            order: the order of an epoch of the loader.
            asked: True if the user has asked for balanced batches. If the order is not balanced
                nevertheless, it cannot be balanced.
        """
        divisible = order.size is not None and order.batch > 1 and (order.balanced or not asked)
        return cls(order.split, order.balanced, divisible)


def find(
    measures: Measures, *, found: Sequence[str] = (), lost_time: Sequence[str] = (), clippable: bool = True
) -> list[str]:
    """Return sentences about missing pushes, the sentences in `found`, and sentences about clipping and lost time.

    The result is [] if nothing was found: few pushes were dropped, almost all other pushes were applied, no worker
    clipped its own gradients, and the workers lost little time.

    Args:
        measures: the statistics of the run.
        found: sentences that were found while the run was in progress.
        lost_time: sentences about the time that the workers lost, and what would help; see `look.causes`.
        clippable: False if the sync model does not allow the joint gradient to be clipped; see
            `SyncModel.agrees_on_means`.
    """
    unapplied = unapplied_pushes(measures.pushes, measures.unapplied) or missing_updates(measures)
    all_found = [unapplied, *found, *_clipping(measures, clippable), *lost_time]
    return [sentence for sentence in all_found if sentence]


def find_moved(moved: int, *, python: bool = False) -> list[str]:
    """Return a text about samples that workers had not used when they were lost or left, and that were used later.

    The result is [] if there were no such samples.

    What would help is in the same text, because each text counts as a cause of its own.

    Args:
        moved: number of samples of earlier epochs that were used in a later epoch.
        python: True if the workers ran a function, so that options are named as arguments of `paceline.launch`.
    """
    if not moved:
        return []
    hint = (
        "To use such samples in the same epoch, add --split dynamic; if the script chooses the split itself, call "
        "paceline.distribute(loader, split='dynamic')."
    )
    return [
        f"Workers that were lost, or left early, had not used {moved} of their samples, which other workers received "
        "in later epochs. So not all epochs had the same samples: with a static split, as under bsp, the shares of "
        f"an epoch are final when the epoch begins. {in_python(hint) if python else hint}",
    ]


def _clipping(measures: Measures, clippable: bool) -> list[str]:
    """Return a sentence about gradients that workers clipped before they were averaged, and perhaps a hint."""
    if not measures.clipped_alone:
        return []
    share = f"{measures.clipped_alone} of {measures.pushes.averaged} averaged gradients were"
    if measures.clipped_alone == measures.pushes.averaged:
        share = "The averaged gradients were"
    clipped = (
        f"{share} clipped by each worker before they were averaged (torch.nn.utils.clip_grad_norm_), which differs "
        "from clipping the joint gradient, as a single process does."
    )
    return [clipped, CLIP] if clippable else [clipped]


def how_to_check(
    run_dir: str | None,
    program: Sequence[str],
    syncs: Sequence[str] = ("bsp", "asp", "elastic-bsp"),
    changes: Sequence[str] = (),
    *,
    joint: bool = False,
) -> str:
    """Return the command, or the call in Python, that shows the accuracy of sync models on the machines of a run.

    Args:
        run_dir: the run directory, to be named in the command; None if the directory lacks records of workers.
        program: what each worker ran, as in `ProcessOrder.arguments`; () if it is unknown.
        syncs: the models.
        changes: options that change the machines.
        joint: True if the batch size of the script's loader is the size of the joint batch.

    >>> how_to_check("runs/1", ["script", "train.py", "--epochs", "3"], ["bsp", "asp"])
    "paceline simulate runs/1 --script 'train.py --epochs 3' --sync bsp,asp"
    >>> how_to_check("runs/1", ["script", "train.py"], ["bsp", "asp"], joint=True)
    'paceline simulate runs/1 --joint-batch --script train.py --sync bsp,asp'
    """
    kind, *words = program or [""]
    if kind == "function":
        return "paceline.simulate(cluster, sync, train_fn=FUNCTION)"
    if kind != "script" or run_dir is None:
        return f"paceline simulate CLUSTER --script SCRIPT --sync {','.join(syncs)} (see docs/how-to/simulate.md)"
    options = [*changes, *["--joint-batch"] * joint]
    return shlex.join(
        ["paceline", "simulate", run_dir, *options, "--script", shlex.join(words), "--sync", ",".join(syncs)]
    )


def in_python(hint: str) -> str:
    """Return a sentence in which options are named as arguments of `paceline.launch`.

    >>> in_python("Try --batch balanced, or --wire gradients=int8,weights=int4.")
    "Try batch='balanced', or wire='gradients=int8,weights=int4'."
    """
    return OPTION.sub(r"\1='\2'", hint)
