"""Sync models and an optimizer that fail, for tests. A test copies this module to where it is the user's own."""

from __future__ import annotations

from typing import Any

import torch

from paceline.sync import JobMachine, ShardMachine, SyncModel, register
from paceline.sync.actions import AnswerPull, AnyAction, ApplyPush, DropPush, HoldPush
from paceline.sync.events import (
    AnyEvent,
    IterationFinished,
    PullRequested,
    PushReceived,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
)

FAILING = 3  # the iteration in which a model fails


def look_up(names: dict[str, int]) -> int:
    return names["missing"]


class Plain(ShardMachine):
    """ASP, which fails as its model says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def pushed(self, push: PushReceived) -> list[AnyAction]:
        if push.iteration == FAILING and self._how in WRONG:
            return WRONG[self._how]  # type: ignore[no-any-return]
        self._fail("pushed", push.iteration)
        if self._how == "holds" and not push.empty:
            return [HoldPush(push.worker, push.iteration)]
        if self._how == "drops":
            return [DropPush(push.worker, push.iteration)]
        return [(DropPush if push.empty else ApplyPush)(push.worker, push.iteration)]

    def pulled(self, pull: PullRequested) -> list[AnyAction]:
        self._fail("pulled", pull.iteration)
        return [] if self._how == "blocks" else [AnswerPull(pull.worker, pull.iteration)]

    def joined(self, event: WorkerJoined) -> list[AnyAction]:
        self._fail("joined")
        return []

    def left(self, event: WorkerLost | WorkerFinished) -> list[AnyAction]:
        self._fail("left")
        return []

    def check(self, event: AnyEvent) -> None:
        self._fail("check")

    def _fail(self, method: str, iteration: int = FAILING) -> None:
        if self._how == method and iteration == FAILING:
            look_up({})


WRONG: dict[str, Any] = {"none": None, "text": ["apply"], "stranger": [AnswerPull(7, 7)]}


class Planner(JobMachine):
    def finished(self, event: IterationFinished) -> list[AnyAction]:
        if event.iteration == FAILING:
            look_up({})
        return []


@register
class Failing(SyncModel, frozen=True):
    """`how` names the method that fails, or what else is wrong."""

    name = "failing"

    how: str = "nothing"

    def __post_init__(self) -> None:
        if self.how == "refused":
            raise ValueError("how is refused")

    @property
    def needs_starts(self) -> bool:
        return self.how == "planner"

    def at_shard(self, seed: int = 0, shard: int = 0) -> ShardMachine:
        if self.how == "at_shard":
            look_up({})
        return Plain(self.how)

    def at_coordinator(self, seed: int = 0) -> JobMachine | None:
        return Planner() if self.how == "planner" else None


class FailingSGD(torch.optim.Optimizer):
    """SGD without options, whose fifth step fails if it is taken by a server."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", torch.zeros(())) + 1
                if parameter.numel() == 1236 and state["count"] == 5:
                    look_up({})
                parameter.add_(parameter.grad, alpha=-group["lr"])
