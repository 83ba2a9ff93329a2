"""The function or the script that a study trains, or the problem, which comes with Paceline.

A function is given by its name, "module:function" or "file.py:function". In Python, the function object may be given
instead. The function's parameters receive the hyper-parameters of the study by their names, and the seed if there is a
parameter `seed`. The command of a script contains the hyper-parameters in braces: "train.py --lr {rate} --seed {seed}".

Every process of the study loads the function or the script itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import msgspec

from ..errors import ConfigurationError, first_line, unknown_name
from ..run.job_options import require_script

SEED = "seed"
"""Name of the hyper-parameter that receives the seed of a run."""

Value = str | int | float | bool
Values = Mapping[str, Value]


class Run(NamedTuple):
    """A training function and its arguments, as `simulate` takes them."""

    function: Callable[..., object]
    args: tuple[object, ...]


class TrainedProblem(msgspec.Struct, frozen=True):
    """The function, script or problem that a study trains, in a form that can be sent to another process.

    Attributes:
        name: the name of the function or the problem, or the command of the script.
        kind: "name" for the name of a function, "function" for a function object, "script" or "problem".
        folders: folders with the modules that the function or the script imports.
        content: the pickled function, if a function object was given.
        digest: fingerprint of the source text; "" for a problem.
    """

    name: str
    kind: str
    folders: tuple[str, ...] = ()
    content: bytes = b""
    digest: str = ""

    @property
    def fresh(self) -> bool:
        """True if each run needs a new process, because a script is run as a program and keeps state in modules."""
        return self.kind == "script"

    @property
    def title(self) -> str:
        """The name without the folder of its file, which differs between machines."""
        if self.kind == "script":
            file, *arguments = shlex.split(self.name)
            return shlex.join([Path(file).name, *arguments])
        return Path(self.name).name if self.kind == "name" else self.name

    def run(self, values: Values, seed: int) -> Run:
        """Return the function to run, with its arguments, for some hyper-parameters and a seed."""
        if self.kind == "script":
            path, *arguments = (_filled(part, {**values, SEED: seed}) for part in shlex.split(self.name))
            return Run(_run_script, (path, arguments, self.folders))
        function = _loaded(self)
        parameters = inspect.signature(function).parameters
        seeded = {SEED: seed} if SEED in parameters and SEED not in values else {}
        return Run(functools.partial(function, **values, **seeded), ())

    def require(self, names: Collection[str]) -> None:
        """Raise `ConfigurationError` unless these hyper-parameters can be set, and no others need to be set."""
        if self.kind == "script":
            _require_placeholders(self.name, names)
        else:
            _require_parameters(self.name, _loaded(self), names)


def of_problem(name: str) -> TrainedProblem:
    """Return a problem that comes with Paceline.

    Raises:
        ConfigurationError: there is no problem with this name.
    """
    if name not in PROBLEMS:
        raise unknown_name("problem", name, PROBLEMS)
    return TrainedProblem(name, "problem")


def of_script(command: str, folder: Path) -> TrainedProblem:
    """Return a script, whose path is relative to a folder.

    Raises:
        ConfigurationError: there is no such script, or it cannot be compiled.
    """
    try:
        path, *arguments = shlex.split(command) or [""]
    except ValueError as error:
        raise ConfigurationError(f"script is {command!r}, which cannot be parsed: {error}.") from error
    file = (folder / path).resolve()
    if not file.is_file():
        raise ConfigurationError(
            f"script is {command!r}, but there is no file {path!r} in {folder.resolve()}."
        )
    require_script(file)
    return TrainedProblem(
        shlex.join([str(file), *arguments]), "script", (str(file.parent),), digest=_digest(file.read_bytes())
    )


def of_name(name: str, folder: Path) -> TrainedProblem:
    """Return a function by its name: "module:function", or "file.py:function" with a path relative to a folder.

    Raises:
        ConfigurationError: there is no such function, or it cannot be imported.
    """
    where, colon, function = name.rpartition(":")
    if not (colon and where and function.isidentifier()):
        raise ConfigurationError(
            f"train is {name!r}, expected the name of a function, such as 'train.py:train' or 'my_package:train'."
        )
    if where.endswith(".py"):
        file = (folder / where).resolve()
        if not file.is_file():
            raise ConfigurationError(
                f"train is {name!r}, but there is no file {where!r} in {folder.resolve()}."
            )
        trained = TrainedProblem(
            f"{file}:{function}", "name", (str(file.parent),), digest=_digest(file.read_bytes())
        )
    else:
        trained = TrainedProblem(name, "name", (str(folder.resolve()),))
    found = _loaded(trained)
    return trained if trained.digest else msgspec.structs.replace(trained, digest=source_digest(found))


def of_function(function: Callable[..., object]) -> TrainedProblem:
    """Return a function that is given as an object.

    Raises:
        ConfigurationError: the function cannot be sent to another process.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # pickling may raise any exception of the pickled object's own methods
        raise ConfigurationError(
            f"the function {name} cannot be sent to another process: {first_line(error)}. Define it at the top level "
            "of a module."
        ) from error
    return TrainedProblem(name, "function", content=content, digest=source_digest(function))


@functools.cache
def _loaded(trained: TrainedProblem) -> Callable[..., object]:
    """Return the function. This process imports the function on first use."""
    if trained.kind == "problem":
        return PROBLEMS[trained.name]
    if trained.kind == "function":
        given: Callable[..., object] = cloudpickle.loads(trained.content)
        return given
    for folder in trained.folders:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    where, _, name = trained.name.rpartition(":")
    try:
        module = _of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # a module may raise any exception when it is imported
        raise ConfigurationError(f"{where} cannot be imported: {first_line(error)}.") from error
    functions: dict[str, Callable[..., object]] = {
        key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")
    }
    if name not in functions:
        own = [key for key, value in functions.items() if getattr(value, "__module__", "") == module.__name__]
        raise unknown_name(f"function of {where}", name, own)
    return functions[name]


def _of_file(path: Path) -> Any:
    """Import a file under the name that it would have as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_script(path: str, arguments: Sequence[str], folders: Sequence[str]) -> None:
    """Run a script as a program, as one worker of a run. This process runs no other script."""
    sys.argv = [path, *arguments]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    runpy.run_path(path, None, "__main__")


PLACEHOLDER = re.compile(r"\{(\w+)\}")


def _filled(part: str, values: Values) -> str:
    """Return a part of a command with the values in place of their names in braces."""
    return PLACEHOLDER.sub(lambda match: str(values[match[1]]) if match[1] in values else match[0], part)


def _require_placeholders(command: str, names: Collection[str]) -> None:
    found = set(PLACEHOLDER.findall(command))
    for name in names:
        if name not in found:
            raise ConfigurationError(
                f"the hyper-parameter {name!r} is not in the command of the script: write {{{name}}} where its value "
                "belongs."
            )
    for name in sorted(found - set(names) - {SEED}):
        raise ConfigurationError(
            f"the command of the script contains {{{name}}}, but the study has no such hyper-parameter; known ones: "
            f"{', '.join(sorted({*names, SEED}))}."
        )


def _require_parameters(name: str, function: Callable[..., object], names: Collection[str]) -> None:
    parameters = inspect.signature(function).parameters.values()
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        for given in names:
            if given not in named:
                raise unknown_name(f"hyper-parameter of {Path(name).name}", given, named)
    for each in parameters:
        missing = each.default is each.empty and each.name not in (*names, SEED)
        if missing and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise ConfigurationError(
                f"{Path(name).name} has a parameter {each.name!r} without a value: give it in [grid] or [arguments]."
            )


def source_digest(what: Any) -> str:
    """Return a fingerprint of the text of a module, or of the module that defines a function or a class.

    If a script, `__main__`, defines the function or class, only the text of the function or class counts.
    """
    try:
        module = inspect.getmodule(what)
        text = inspect.getsource(what if module is None or module.__name__ == "__main__" else module)
    except (OSError, TypeError):  # there is no text
        text = repr(getattr(what, "__qualname__", ""))
    return _digest(text.encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# -- Problems that come with Paceline: training functions that need no file of the user ----------------------
#
# Each problem logs a metric that can be the target of a study, and takes its hyper-parameters by name.


@functools.cache
def _digits() -> Any:
    """Return the digits, which all workers and runs of a process share."""
    from ..lab.demo import load

    return load()


def digits(
    rate: float = 0.1,
    momentum: float = 0.9,
    batch: int = 16,
    epochs: int = 6,
    hidden: int = 64,
    every: int = 5,
) -> None:
    """Train a network with one hidden layer on scikit-learn's digits. The main worker logs `accuracy` on test images.

    Args:
        rate: learning rate of SGD.
        momentum: momentum of SGD.
        batch: number of images in a worker's batch.
        epochs: number of epochs.
        hidden: number of neurons in the hidden layer.
        every: number of the main worker's iterations between two evaluations.
    """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from ..train.collectives import evaluating, is_main
    from ..train.data import distribute
    from ..train.epochs import epochs as epochs_of
    from ..train.metrics import log
    from ..train.optimizer import DistributedOptimizer

    data = _digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum), model=model
    )
    loader = DataLoader(TensorDataset(data.train_images, data.train_labels), batch, shuffle=True)
    steps = 0
    for _ in epochs_of(epochs):
        for x, y in distribute(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
            if is_main() and steps % every == 0:
                with evaluating(model) as snapshot, torch.no_grad():
                    right = snapshot(data.test_images).argmax(dim=1) == data.test_labels
                log(accuracy=right.float().mean().item())


def quadratic(
    rate: float = 0.1, momentum: float = 0.0, iterations: int = 60, noise: float = 0.3, every: int = 2
) -> None:
    """Minimize a quadratic with curvatures from 1 to 1/64 and noisy gradients. The main worker logs the `loss`.

    Args:
        rate: learning rate of SGD.
        momentum: momentum of SGD.
        iterations: number of iterations of each worker.
        noise: standard deviation of the gradient's noise, for a curvature of 1.
        every: number of the main worker's iterations between two evaluations.
    """
    import torch

    from ..train.collectives import evaluating, is_main
    from ..train.metrics import log
    from ..train.optimizer import DistributedOptimizer

    curvatures = 2.0 ** -torch.arange(7.0)
    model = torch.nn.Linear(7, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum), model=model
    )
    for step in range(1, iterations + 1):
        optimizer.zero_grad()
        weights = model.weight.flatten()
        slope = noise * curvatures.sqrt() * torch.randn(7)
        (0.5 * (curvatures * weights.square()).sum() + (slope * weights).sum()).backward()
        optimizer.step()
        if is_main() and step % every == 0:
            with evaluating(model) as snapshot, torch.no_grad():
                weights = snapshot.weight.flatten()
            log(loss=0.5 * (curvatures * weights.square()).sum().item())


PROBLEMS: Mapping[str, Callable[..., None]] = {"digits": digits, "quadratic": quadratic}
"""The problems by name."""
