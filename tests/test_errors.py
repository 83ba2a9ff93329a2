"""The tree of errors."""

from __future__ import annotations

import pickle

import pytest

from paceline import errors
from paceline.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    InternalError,
    InvalidEventError,
    NonFiniteGradientError,
    PacelineError,
    PeerLostError,
    ProtocolError,
    RunFailedError,
    SyncRefusedError,
    TakenOutError,
    UsageError,
    UserCodeError,
    WeightsChangedError,
    unknown_name,
)

SAMPLES: list[PacelineError] = [
    PacelineError("something"),
    ConfigurationError("workers is 0, expected at least 1"),
    SyncRefusedError("clip_grad_norm() is refused under conditions"),
    UsageError("step() was called after finish()"),
    WeightsChangedError("conv.weight was moved"),
    NonFiniteGradientError(2, 17, "conv.weight"),
    ProtocolError("a header of 3 GB"),
    InvalidEventError("worker 3 pushed twice"),
    PeerLostError("worker 1"),
    TakenOutError("worker 1"),
    DeadlineError("no answer within 5 s"),
    CheckpointError("the disk is full"),
    RunFailedError("worker 2", "ValueError: no", "Traceback (most recent call last):\n  ..."),
    RunFailedError("worker 2", "ValueError: no", machine="10.0.0.2"),
    RunFailedError("the run", "every worker was lost"),
    UserCodeError(
        "the sync model mine raised KeyError: 'x' at shard 0", "Traceback (most recent call last):\n  ..."
    ),
    InternalError("the ledger disagrees with itself", ("first event", "second event")),
]


def test_the_samples_are_the_whole_tree() -> None:
    defined = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert {type(sample) for sample in SAMPLES} == defined
    functions = {"first_line", "nearest", "refused_by_system", "unknown_name"}
    assert {kind.__name__ for kind in defined} | functions == set(errors.__all__)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_it_survives_pickling_with_its_message_and_attributes(error: PacelineError) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_it_is_caught_as_paceline_s_own(error: PacelineError) -> None:
    with pytest.raises(PacelineError):
        raise error


def test_faults_are_told_apart() -> None:
    assert issubclass(WeightsChangedError, UsageError)
    assert issubclass(NonFiniteGradientError, UsageError)
    assert issubclass(InvalidEventError, ProtocolError)
    assert not issubclass(ConfigurationError, UsageError)
    assert not issubclass(InternalError, ProtocolError)


def test_a_gradient_that_is_not_finite_is_named_with_worker_iteration_and_parameter() -> None:
    message = str(NonFiniteGradientError(2, 17, "conv.weight"))
    assert all(part in message for part in ("worker 2", "iteration 17", "'conv.weight'", "--on-nan skip"))


def test_a_failed_run_shows_the_process_its_machine_its_reason_and_its_own_traceback() -> None:
    error = RunFailedError("worker 2", "ValueError: no", "Traceback ...\n")
    assert str(error) == "worker 2 failed: ValueError: no\nTraceback ..."
    assert (
        str(RunFailedError("worker 2", "it is lost", machine="10.0.0.2"))
        == "worker 2 on 10.0.0.2 failed: it is lost"
    )
    assert str(RunFailedError("the run", "every worker was lost")) == "the run failed: every worker was lost"


def test_our_own_bugs_ask_to_be_reported_and_tell_their_story() -> None:
    message = str(InternalError("it broke", ("first", "second")))
    assert message.splitlines()[1:] == ["  'first'", "  'second'"]
    assert "please report it" in message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("bps", "bsp"), ("elastic_bsp", "elastic-bsp"), ("ssp ", "ssp"), ("ellastic", "elastic-bsp")],
)
def test_an_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    error = unknown_name("sync model", name, ["ssp", "bsp", "asp", "elastic-bsp"])
    assert isinstance(error, ConfigurationError)
    assert f"unknown sync model {name!r}; did you mean {nearest!r}?" in str(error)
    assert str(error).endswith("Choices: asp, bsp, elastic-bsp, ssp.")


def test_a_name_that_is_near_nothing_gets_no_suggestion() -> None:
    message = str(unknown_name("engine", "kubernetes", ["local"]))
    assert message == "unknown engine 'kubernetes'. Choices: local."
