"""A cut of a job as a value: it survives being written as JSON, and says with what the shards of a new run begin."""

from __future__ import annotations

import msgspec

from paceline.core.protocol.job_cut import EpochCut, JobCut, LoaderCut, LoopCut, ShardState
from paceline.core.protocol.layout import Layout, Parameter
from paceline.core.protocol.lease import Lease, Order
from paceline.core.protocol.messages import LoopLimits, LoopPosition
from paceline.core.protocol.model_spec import ModelSpec, OptimizerSpec

LAYOUT = Layout.of([Parameter(("weight",), (4, 5), "float32"), Parameter(("bias", "b"), (5,), "float64")])
MODEL = ModelSpec(
    LAYOUT,
    OptimizerSpec("Adam", ({"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "amsgrad": False},), (0, 0)),
    (),
)
ORDER = Order(100, 4, False, "auto", "digest")

CUT = JobCut(
    number=3,
    elapsed_s=12.5,
    seed=7,
    sync="ssp:staleness=2",
    model=MODEL,
    extensions=(MODEL,),
    slices=tuple(LAYOUT.slice_evenly(2)),
    shards=(ShardState(9, 36), ShardState(8, 32)),
    loaders=(
        LoaderCut(
            name="data",
            opened=1,
            order=ORDER,
            epochs=(EpochCut(0, ORDER, 40),),
            returned=(Lease(0, 8, 4, 4, 1),),
        ),
    ),
    loop=LoopCut(position=LoopPosition(0, 1, passes=(("data", 1),)), begun=0, limits=LoopLimits(epochs=3)),
)


def test_a_cut_is_equal_after_it_was_written_as_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(CUT), type=JobCut) == CUT


def test_the_shards_of_a_run_with_another_number_of_shards_begin_with_the_progress_of_shard_0() -> None:
    assert CUT.states_of(2) == (ShardState(9, 36), ShardState(8, 32))
    assert CUT.states_of(3) == (ShardState(9, 36),) * 3
