"""Computes how much time the optimizers' steps cost the servers, and whether more servers would make a step faster.

An update of most optimizers takes a moment. But Muon orthogonalizes matrices, which takes seconds if they are large.
During this time, all workers that need the new weights must wait. Each server measures its steps
(`core.messages.StepsTimed`). From these times, the cost of a step with another number of servers is predicted. The work
of an update is the sum of `OptimizerSpec.cost_of` over the parameters, and every parameter set has its own time per
unit of work. The shards are those into which the layout would divide the model for the other number of servers. So if
one tensor takes most of the time of a step, more servers are not expected to make the step faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from ..core.layout import ModelSpec, ShardSlice, round_robin
from ..core.messages import StepsTimed
from ..errors import ConfigurationError
from ..words import counted, length, percent

LEAST_SHARE = 0.2  # steps hardly matter if they take a smaller share of a server's time
LEAST_S = 0.01  # a step that takes less time is not mentioned
FASTER = 1.1  # more servers must make a step at least this many times as fast
NAMED_SHARE = 0.1  # an optimizer is named if it takes at least this share of the time of a step

FEW, FACTORS = range(1, 9), (2, 3, 4, 6, 8)
"""The cost of a step is predicted for these numbers of servers, and for these multiples of the run's own number."""


ACCELERATOR = " An accelerator on the servers' machine can make the steps, too (--server-device)."


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The time that a step of all optimizers costs the servers of a run.

    Attributes:
        optimizers: name of each optimizer whose steps take a considerable time.
        servers: number of servers.
        step_s: time in which the slowest server makes a step of every optimizer, in seconds.
        share: largest share of a server's time in which it made steps, from 0 to 1.
        predicted_s: number of servers -> what `step_s` would be, if each server had as many cores as now.
        here_s: number of servers -> what `step_s` would be, if all servers shared the cores of this machine; {} if
            the servers may be on several machines.
        largest: of the tensors that an optimizer needs whole, the one whose update takes longest. It is never divided
            between servers. "" if no optimizer needs whole tensors.
        largest_s: the time of this tensor's update, in seconds.
        on_host: True if an accelerator could make steps that are made on the CPU.
    """

    optimizers: list[str]
    servers: int
    step_s: float
    share: float
    predicted_s: dict[int, float]
    here_s: dict[int, float]
    largest: str = ""
    largest_s: float = 0.0
    on_host: bool = False

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        slices: Sequence[ShardSlice],
        reports: Mapping[int, StepsTimed],
        *,
        slicing: str,
        block: int,
        servers: int,
        cores_of: Callable[[int], float] | None,
        on_host: bool = True,
    ) -> StepCost | None:
        """Return what steps cost; None while a server has not reported its steps.

        Args:
            model: the model.
            slices: the slice of each shard.
            reports: server -> its latest report.
            slicing: how the parameters are sliced; see `ModelSpec.sliced`.
            block: see `ModelSpec.sliced`.
            servers: number of servers.
            cores_of: given a number of servers, returns how many cores of this machine each server has; None if the
                servers may be on several machines.
            on_host: False if steps of whole tensors are made on a device.
        """
        if len(reports) < servers:
            return None
        optimizers = model.optimizers
        works = [_work(model, bounds) for bounds in slices]
        total_s = [0.0] * len(optimizers)
        for report in reports.values():
            for each in report.steps:
                total_s[each.set_index] += each.typical_s
        rates = [
            seconds / (sum(work) or 1.0)
            for seconds, work in zip(total_s, zip(*works, strict=True), strict=True)
        ]
        placement = round_robin(len(slices), servers)
        step_s = max(sum(each.typical_s for each in report.steps) for report in reports.values())
        now = _slowest([placement.held_by(server, works) for server in placement.servers], rates)
        factor = step_s / (now or 1.0)
        predicted_s = {servers: step_s}
        for count in sorted({*FEW, *(servers * more for more in FACTORS)} - {servers}):
            with contextlib.suppress(ConfigurationError):  # too few tensors for so many servers
                sliced = model.sliced(count, slicing, block)
                predicted_s[count] = factor * _slowest([[_work(model, bounds)] for bounds in sliced], rates)
        whole_s = {
            each.names[0]: factor * rates[each.set_index] * optimizers[each.set_index].cost_of(each)
            for each in model.layout.parameters
            if optimizers[each.set_index].whole
        }
        largest = max(whole_s, key=lambda name: whole_s[name], default="")
        here_s = {}
        if cores_of is not None:
            here_s = {
                count: seconds * cores_of(servers) / cores_of(count) for count, seconds in predicted_s.items()
            }
        return cls(
            optimizers=[
                optimizer.name.rpartition(":")[2]
                for optimizer, seconds in zip(optimizers, total_s, strict=True)
                if seconds >= NAMED_SHARE * sum(total_s)
            ],
            servers=servers,
            step_s=step_s,
            share=max(report.share for report in reports.values()),
            predicted_s=predicted_s,
            here_s=here_s,
            largest=largest,
            largest_s=whole_s.get(largest, 0.0),
            on_host=on_host and bool(whole_s),
        )

    @property
    def matters(self) -> bool:
        """True if steps take enough of the servers' time to be mentioned."""
        return self.share >= LEAST_SHARE and self.step_s >= LEAST_S

    @property
    def words(self) -> str:
        """The cost of a step, as a clause."""
        of = f" of {' and '.join(self.optimizers)}" if self.optimizers else ""
        return f"{length(self.step_s)} for each step{of}"

    def sentence(self) -> str:
        """Return what a step costs, and what would help; "" if the cost does not matter."""
        if not self.matters:
            return ""
        who = "The server needs" if self.servers == 1 else "The servers need"
        return f"{who} {self.words}, which is {percent(self.share)} of the time. {self.remedy()}"

    def remedy(self) -> str:
        """Return what would make a step faster, in sentences."""
        return f"{self._more_servers()}{ACCELERATOR * self.on_host}"

    def _more_servers(self) -> str:
        """Return whether more servers would make a step faster, as a sentence."""
        if (count := self._enough(self.here_s)) is not None:
            return f"With --servers {count}, a step would take about {length(self.here_s[count])}."
        if (count := self._enough(self.predicted_s)) is not None:
            where = "with cores of their own" if self.here_s else "on as many machines"
            return (
                f"With {count} servers {where}, a step would take about {length(self.predicted_s[count])} (paceline "
                "serve --remote-servers)."
            )
        if tensor := self._limit(self.step_s):
            return f"More servers do not make a step faster, because {tensor}."
        return "More servers would not make a step faster."

    def with_servers(self, count: int) -> str:
        """Return what a step would cost with another number of servers, as a sentence; "" if this is unknown."""
        if not self.matters or count == self.servers or count not in self.predicted_s:
            return ""
        step_s = self.predicted_s[count]
        tensor = self._limit(step_s)
        return (
            f"With {counted(count, 'server')}, each with as many cores as now, a step would take about "
            f"{length(step_s)} instead of {length(self.step_s)}{tensor and f', because {tensor}'}. The simulations do "
            "not take this into account."
        )

    def _limit(self, step_s: float) -> str:
        """Return the tensor that takes most of the time of a step, as a clause; "" if there is none."""
        if self.largest_s < step_s / 2:
            return ""
        return f"{self.largest} is one tensor, whose update takes {length(self.largest_s)}"

    def _enough(self, step_s: Mapping[int, float]) -> int | None:
        """Return the smallest number of servers that is enough; None if more servers do not help.

        A number is enough if steps then hardly matter, or if no larger number makes a step clearly faster.

        Args:
            step_s: number of servers -> time of a step.
        """
        rest_s = self.step_s * (1.0 - self.share) / max(self.share, 1e-9)
        found, best_s = None, self.step_s
        for count, seconds in sorted(step_s.items()):
            if count <= self.servers:
                continue
            if best_s < LEAST_SHARE * (rest_s + best_s):
                break
            if seconds * FASTER <= best_s:
                found, best_s = count, seconds
        return found


def _work(model: ModelSpec, bounds: ShardSlice) -> list[float]:
    """Return the work of an update of a slice, for each parameter set in a unit of its own."""
    found = [0.0] * len(model.optimizers)
    for segment in bounds.segments:
        parameter = model.layout.parameters[segment.parameter]
        part = (segment.stop - segment.start) / parameter.size
        found[parameter.set_index] += part * model.optimizers[parameter.set_index].cost_of(parameter)
    return found


def _slowest(held: Sequence[Collection[Sequence[float]]], rates: Sequence[float]) -> float:
    """Return the time of a step of the slowest server.

    Args:
        held: for each server, the work of each of its shards.
        rates: for each parameter set, the time of a unit of its work.
    """
    return max(
        sum(work * rate for each in shards for work, rate in zip(each, rates, strict=True)) for shards in held
    )


def step_cost_in(summary: Mapping[str, Any]) -> StepCost | None:
    """Return what steps cost according to the summary of a run; None if this is unknown."""
    found = summary.get("step_cost")
    try:
        return None if found is None else msgspec.convert(found, StepCost, strict=False)
    except msgspec.ValidationError:  # the summary is from another version
        return None
