"""`barrier` and `reduce`, calls that all workers make, and that end together in all workers."""

from __future__ import annotations

import math
import numbers
from array import array
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch

from ..core.protocol.messages import MOST_WORDS, Contributed
from ..core.sync.joint_calls import ITEM_BYTES, LIMIT_BYTES, combine
from ..errors import UsageError
from .saving import NO_PATHS, path_numbers, warn_of_paths
from .session import current
from .training import training_of

__all__ = ["barrier", "reduce"]

Value = TypeVar("Value")


def barrier() -> None:
    """Wait until all other workers have called `barrier()`, too.

    A worker that has finished or is lost is not waited for. Outside a run, the function returns at once.

    All workers must make the same calls of `barrier` and `reduce`, in the same order. Call them between two
    iterations. Under `bsp`, call them after the same number of iterations: if a worker waits for another one that
    cannot finish its iteration without it, the run ends with an error that names both. Under a model whose workers
    may differ in their number of iterations, and may wait for each other, as under `ssp`, a worker that waits here
    pushes without a gradient, as inside `evaluating`, and continues with the newest weights.

    Raises:
        UsageError: the workers' calls differ, or the call was made inside `optimizer.editing()`.
        WeightsChangedError: weights have been changed since the last step.

    Example:
        >>> import paceline
        >>> if paceline.is_main():
        ...     words = "the data that worker 0 downloads".split()
        >>> paceline.barrier()
    """
    session = current()
    numbers = array("d", NO_PATHS if session is None else path_numbers(session))
    sums = _combined("barrier()", "sum", numbers, 1.0)
    if session is not None:
        warn_of_paths(session, sums)


def reduce(value: Value, op: Literal["mean", "sum"] = "mean", *, weight: float | None = None) -> Value:
    """Return the mean or the sum of a value over all workers. Every worker receives the same result.

    The function waits until all other workers have called it, as `barrier` does, and the rules given there apply. The
    result is over the workers that make the call: those that have not finished and are not lost. It is computed in
    float64, in the order of the workers' indices, so it does not depend on who arrives first.

    Args:
        value: a number, a tensor, or a dictionary of numbers and tensors with the same keys and shapes in all
            workers; at most 1 MiB as float64.
        op: "mean" or "sum".
        weight: the weight of this worker's value in the mean, for example the number of samples that it describes.
            Default: 1 for each worker. If all weights are 0, the mean is NaN.

    Returns:
        A value of the same kind. A floating-point tensor keeps its dtype; the mean of an integer tensor has torch's
        default dtype. The sum of integers is an integer.

    Raises:
        UsageError: `value`, `op` or `weight` cannot be used, the workers' calls differ, or the call was made inside
            `optimizer.editing()`.
        WeightsChangedError: weights have been changed since the last step.

    Example:
        >>> import paceline
        >>> paceline.reduce({"loss": 0.5, "correct": 12}, "sum")
        {'loss': 0.5, 'correct': 12}
    """
    _require_operation(op, weight)
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        raise UsageError(f"reduce() got a dictionary with the keys {list(value)}, expected strings.")
    entries = value if isinstance(value, Mapping) else {None: value}
    names = sorted(entries)
    for name in names:
        _require_real(name, entries[name])
    count = sum(_count(entries[name]) for name in names)
    if count * ITEM_BYTES > LIMIT_BYTES:
        raise UsageError(
            f"reduce() got {count} numbers, expected at most {LIMIT_BYTES // ITEM_BYTES}. It is meant for metrics; "
            "gradients and weights are exchanged by step()."
        )
    flat = array("d", [number for name in names for number in _flat(entries[name])])
    shapes = ", ".join(_described(name, entries[name]) for name in names)
    call = f"reduce(op={op!r}) of {shapes if shapes else 'nothing'}"
    if len(call) > MOST_WORDS:
        raise UsageError(
            f"reduce() got {len(names)} keys with {sum(map(len, names))} characters. Use fewer or shorter keys."
        )
    combined = _combined(call, op, flat, 1.0 if weight is None else float(weight))
    results = {}
    for name in names:
        size = _count(entries[name])
        results[name], combined = _like(entries[name], combined[:size], op), combined[size:]
    if isinstance(value, Mapping):
        return {name: results[name] for name in value}  # type: ignore[return-value]
    return results[None]  # type: ignore[no-any-return]


def _combined(call: str, op: Literal["mean", "sum"], values: array[float], weight: float) -> array[float]:
    """Combine the values of all workers."""
    session = current()
    numbers = values.tobytes()
    if session is None:
        combined = combine({0: Contributed(call, 1, op, numbers, weight)})
    else:
        combined = (training_of(session) or session).combine(call, op, numbers, weight)
    if combined.refused:
        raise UsageError(f"The workers' calls differ: {combined.refused}")
    return array("d", combined.numbers)


def _require_operation(op: str, weight: float | None) -> None:
    if op not in ("mean", "sum"):
        raise UsageError(f'reduce() got op={op!r}, expected "mean" or "sum".')
    if weight is None:
        return
    usable = isinstance(weight, numbers.Real) and math.isfinite(weight) and weight >= 0
    if op == "sum" or not usable:
        raise UsageError(
            f"reduce() got weight={weight!r}, expected a number >= 0 for a mean, and no weight for a sum."
        )


def _require_real(name: str | None, value: object) -> None:
    real = not value.is_complex() if isinstance(value, torch.Tensor) else isinstance(value, numbers.Real)
    if not real:
        where = "" if name is None else f" under the key {name!r}"
        raise UsageError(
            f"reduce() got {value!r}{where}, expected a number, a tensor, or a dictionary of numbers and tensors."
        )


def _count(value: object) -> int:
    """Return how many numbers a value consists of."""
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _flat(value: Any) -> list[float]:
    if isinstance(value, torch.Tensor):
        flat: list[float] = value.detach().cpu().to(torch.float64).reshape(-1).tolist()
        return flat
    return [float(value)]


def _described(name: str | None, value: object) -> str:
    kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "a number"
    return kind if name is None else f"{name!r}: {kind}"


def _like(value: Any, combined: array[float], op: str) -> Any:
    """Return the combined numbers as a value of the same kind."""
    if isinstance(value, torch.Tensor):
        result = torch.tensor(combined, dtype=torch.float64).reshape(value.shape)
        if value.is_floating_point():
            dtype = value.dtype
        elif op == "mean":
            dtype = torch.get_default_dtype()
        else:
            dtype = torch.int64 if value.dtype == torch.bool else value.dtype
        return result.to(dtype).to(value.device)
    [number] = combined
    return int(number) if op == "sum" and isinstance(value, numbers.Integral) else number
