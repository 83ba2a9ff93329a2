"""ElasticBSP's two machines together: planner, several shards and workers, through random interleavings.

Messages of one worker to one peer keep their order; everything else, a plan's arrival above all, may be late as
long as it likes. What is checked on the way and at the end is in `paceline.testing.small_job`: who waits, what
becomes of each push, that NEVER hangs, and that all shards average the same pushes in the same superstep.
"""

from __future__ import annotations

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sync import ASP, BSP, SSP, ElasticBSP, SyncModel
from paceline.testing.admission import NEVER, STOPPED, Admission, more_ahead_than
from paceline.testing.small_job import SmallJob
from paceline.testing.state_pools import State


def run(cluster: SmallJob, seed: int) -> tuple[State, list[str]]:
    """One interleaving to its end. Some actors are much slower than others, drawn anew for each run."""
    draw = random.Random(seed)
    speed: dict[str, float] = {}
    state = cluster.first
    story: list[str] = []
    while True:
        steps, losses = cluster.steps(state)
        if not steps:
            break
        steps += losses[:1] if draw.random() < 0.02 else []
        weights = []
        for label, _ in steps:
            actor = " ".join(label.split()[:2]) + label.rpartition(" of ")[2]
            weights.append(speed.setdefault(actor, draw.choice([0.02, 1.0, 1.0, 20.0])))
        [(label, take)] = draw.choices(steps, weights)
        cluster.now_ticks += draw.choice([0, 10, 25, 100])
        story.append(f"{cluster.now_ticks} {label}")
        try:
            state = take()
        except Exception as error:
            raise AssertionError("\n".join([*story, repr(error)])) from error
    try:
        cluster.check_end(state)
    except AssertionError as error:
        raise AssertionError("\n".join([*story, str(error)])) from error
    return state, story


@settings(max_examples=25)
@given(
    workers=st.integers(1, 4),
    shards=st.integers(1, 3),
    iterations=st.integers(1, 12),
    late=st.integers(0, 2),
    losses=st.integers(0, 2),
    lookahead=st.integers(1, 4),
    any_plan=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_no_interleaving_hangs_or_makes_shards_disagree(
    workers: int,
    shards: int,
    iterations: int,
    late: int,
    losses: int,
    lookahead: int,
    any_plan: bool,
    seed: int,
) -> None:
    cluster = SmallJob(
        ElasticBSP(lookahead=lookahead),
        STOPPED,
        workers=workers,
        shards=shards,
        iterations=iterations,
        late=late,
        losses=losses,
        any_plan=any_plan,
    )
    run(cluster, seed)


def test_without_losses_every_stopping_push_is_averaged_at_every_shard() -> None:
    supersteps = 0
    for seed in range(12):
        cluster = SmallJob(ElasticBSP(lookahead=2), STOPPED, workers=3, shards=2, iterations=15)
        state, story = run(cluster, seed)
        stops = re.findall(r"worker (\d+) stops after iteration (\d+)", "\n".join(story))
        flagged = {(int(worker), int(iteration)) for worker, iteration in stops}
        for shard in state.servers:
            assert {push for mean in shard.means for push in mean} == flagged
        supersteps += len(state.servers[0].means)
    assert supersteps > 20  # a few for each seed: otherwise nothing has been shown


@settings(max_examples=15)
@given(
    model=st.sampled_from(
        [
            (BSP(), more_ahead_than(0)),
            (ASP(), NEVER),
            (SSP(staleness=1), more_ahead_than(1)),
            (SSP(), more_ahead_than(3)),
        ]
    ),
    workers=st.integers(1, 4),
    late=st.integers(0, 2),
    losses=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_models_that_decide_at_each_shard_alone_hang_nobody(
    model: tuple[SyncModel, Admission], workers: int, late: int, losses: int, seed: int
) -> None:
    sync, must_wait = model
    cluster = SmallJob(
        sync,
        must_wait,
        workers=workers,
        shards=3,
        iterations=6,
        late=late,
        losses=losses,
        agree=not late,  # a late worker's first round may be another one at each shard
    )
    run(cluster, seed)
