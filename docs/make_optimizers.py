"""Write `docs/reference/optimizers.md`, the kind of each optimizer of some packages: `python docs/make_optimizers.py`.

    pip install paceline[porting]
    python docs/make_optimizers.py

Each class is built for a small model and given to the test that a worker makes before training begins. With --check,
nothing is written, and the exit code is 0 if the page is what would be written, 1 otherwise.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import ConfigurationError
from paceline.shard.optimizers import server_optimizer

TARGET = Path(__file__).parent / "reference" / "optimizers.md"
PACKAGES = {"torch": "torch.optim", "schedulefree": "schedulefree", "pytorch-optimizer": "pytorch_optimizer"}
KINDS = ("element by element", "tensor by tensor", "refused")

INTRODUCTION = """\
Can the servers run your optimizer? Before training begins, a worker [tests](../how-to/optimizers.md#the-optimizer) the
class: on slices of small parameters, then on whole tensors. The tables show the kind that the test has found for each
class of some packages. Each class was built with its defaults for a small model: a convolution, a linear layer and
their biases, or only matrices if the class accepts nothing else.

- *Element by element*: the servers hold slices of equal size.
- *Tensor by tensor*: each tensor is whole at one server.
- *Refused*: the run is refused before it begins, with the reason in the table. "..." stands for numbers.
"""

REMEDIES = """\
**What to do about a refusal.** If a class draws random numbers, its updates are never the same twice, so the test
refuses it: register the class with `paceline.register_elementwise` or `paceline.register_tensorwise`. If a class
multiplies the update by a number that it computes from all parameters, such as the norm of the gradient, let the script
do this: `optimizer.clip_grad_norm` clips by the joint norm. Outside a run, every optimizer works.
"""


def model(*, matrices: bool = False) -> nn.Module:
    """Return a small model."""
    if matrices:
        return nn.Linear(6, 4, bias=False)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3))


def with_groups(kind: Any) -> torch.optim.Optimizer:
    """Build a class that tells matrices from other parameters by an entry of its groups."""
    parameters = list(model().parameters())
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        groups[parameter.dim() >= 2].append(parameter)
    optimizer: torch.optim.Optimizer = kind(
        [{"params": members, "use_muon": muon} for muon, members in groups.items()]
    )
    return optimizer


def with_rate(kind: Any, *parameters: nn.Parameter) -> torch.optim.Optimizer:
    """Build a class with its defaults, and with a learning rate if it has none."""
    rate = inspect.signature(kind).parameters.get("lr")
    arguments = {"lr": 0.01} if rate is not None and rate.default is inspect.Parameter.empty else {}
    optimizer: torch.optim.Optimizer = kind(list(parameters), **arguments)
    return optimizer


def around_sgd(kind: Any) -> torch.optim.Optimizer:
    """Build a wrapper around another optimizer."""
    parameters = list(model().parameters())
    optimizer: torch.optim.Optimizer = kind(torch.optim.SGD(parameters, lr=0.01))
    return optimizer


WAYS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda kind: with_rate(kind, *model().parameters()),
    with_groups,
    lambda kind: with_rate(kind, *model(matrices=True).parameters()),
    around_sgd,
    lambda kind: kind(list(model().parameters()), torch.optim.SGD),
    lambda kind: kind(list(model().parameters()), base_optimizer=torch.optim.SGD),
    lambda kind: kind(model()),
    lambda kind: kind(model(), lr=0.01),
    lambda kind: kind(list(model().parameters()), num_data=100),
    lambda kind: kind(list(model().parameters()), num_iterations=100),
)
"""Ways in which the classes can be built."""


def classes(module: str) -> Iterator[type[torch.optim.Optimizer]]:
    """Yield the optimizer classes that a module exports, in the order of their names."""
    for _, kind in sorted(vars(importlib.import_module(module)).items()):
        if (
            isinstance(kind, type)
            and issubclass(kind, torch.optim.Optimizer)
            and kind is not torch.optim.Optimizer
        ):
            yield kind


def found(kind: type[torch.optim.Optimizer]) -> tuple[str, str]:
    """Return the kind of an optimizer class, and the reason if it is refused."""
    reasons = []
    for way in WAYS:
        torch.manual_seed(0)
        np.random.seed(0)
        try:
            with redirect_stdout(StringIO()):  # some classes print
                return KINDS[server_optimizer(way(kind)).whole], ""
        except ConfigurationError as error:
            reasons.append(said(str(error)))
            if "small copy of it failed" not in reasons[-1]:  # else, it may accept matrices only
                break
        except Exception:  # an optimizer may raise any exception
            continue
    return KINDS[2], [*reasons, "it cannot be built from parameters alone"][0]


def said(message: str) -> str:
    """Return the reason in a refusal without its numbers, which depend on the machine."""
    reason = message.partition("of the parameters: ")[2].partition(". Optimizers that")[0] or message
    reason = reason.partition("; and the update of a tensor")[0]
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)? instead of -?\d+(\.\d+)?(e-?\d+)?", "... instead of ...", reason)


def page() -> str:
    """Return the page."""
    sections = ["# Optimizers: which of them can servers run?", INTRODUCTION, REMEDIES]
    for package, module in PACKAGES.items():
        rows = {kind.__name__: found(kind) for kind in classes(module)}
        sections.append(f"## {package} {importlib.metadata.version(package).partition('+')[0]}")
        for of in KINDS[:2]:
            names = [name for name, (kind, _) in rows.items() if kind == of]
            listed = textwrap.fill(", ".join(names), 118) if names else "None."
            sections.append(f"**{of.capitalize()}** ({len(names)} of {len(rows)})\n\n{listed}\n")
        refused = {name: reason for name, (kind, reason) in rows.items() if kind == KINDS[2]}
        if refused:
            lines = [f"| {name} | {reason.replace('|', ' ')} |" for name, reason in refused.items()]
            table = "\n".join(["| Class | Why it is refused |", "|---|---|", *lines])
            sections.append(f"**Refused** ({len(refused)} of {len(rows)})\n\n{table}\n")
    return "\n\n".join(section.strip() for section in sections) + "\n"


def main() -> int:
    """Write the page, or compare it with what would be written."""
    warnings.simplefilter("ignore")
    written = page()
    if "--check" in sys.argv[1:]:
        return int(TARGET.read_text() != written)
    TARGET.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
