"""The random generators that scripts use implicitly: torch's default generators, Python's `random`, and NumPy's.

Simulated workers use these generators in turn, so the generators' states are saved and restored for each worker. The
states are also saved before a computation that may be aborted. With NumPy's own functions, saving and restoring the
state of its global generator takes 70 us, ten times as long as saving and restoring the other two states together. So
this module compares the memory of NumPy's generator with a copy to detect whether numbers have been drawn, and
restores a state by writing to this memory. The memory's address is part of NumPy's public interface.

NumPy draws normal deviates in pairs and stores the second deviate of a pair outside this memory for the next call.
Therefore a change goes undetected if a script calls `set_state` with a state that differs from the saved state only in
the stored deviate.

Each accelerator has a default generator of its own, whose state is saved and restored, too, once the process has used
the accelerator. These states are in the memory of the host, so saving them does not wait for a device.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable, Mapping
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from ..sync.draws import uniform
from .session import Session

OF_WORKER, OF_LOADER = 1 << 20, 1 << 21  # parts of the keys from which seeds are drawn

# The generators belong to the whole process. A thread holds this lock while it saves or replaces their
# states, and while it draws from states that are set only temporarily. A thread that holds the lock may
# acquire it again, because a sampler may use another sampler.
generators_lock = RLock()

_KEY_BYTES = 624 * 4
_RAW_BYTES = _KEY_BYTES + 4  # the generator's key, followed by the position in the key as an int


class GeneratorStates:
    """The states of all generators at the time when this object is created.

    NumPy's generator is ignored if the process has not imported NumPy. The generators of accelerators are ignored if
    the process has not used any accelerator.
    """

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._devices = {device: _module(device).get_rng_state(device) for device in _used_devices()}
        self._python = random.getstate()
        self._numpy = _numpy.state() if "numpy" in sys.modules else None

    @classmethod
    def seeded(cls, seed: int) -> GeneratorStates:
        """Return the states that the generators would have after seeding. The current states do not change."""
        before = cls()
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed unused accelerators
        _seed_devices(before._devices, seed)
        random.seed(seed)
        if before._numpy is not None:
            sys.modules["numpy"].random.seed(seed % 2**32)
        seeded = cls()
        before.give_back()
        return seeded

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> GeneratorStates:
        """Return the states with this content (see `content`), except those of devices that this process lacks."""
        states = cls()
        states._torch, states._python = content["torch"], content["python"]
        present = {str(device): device for device in _used_devices()}
        saved = {present[name]: state for name, state in content["devices"].items() if name in present}
        states._devices |= saved
        if content["numpy"] is not None:
            states._numpy = _NumpyState(content["numpy"], None)
        return states

    @property
    def content(self) -> dict[str, Any]:
        """The states as tensors, NumPy arrays, numbers and strings. NumPy's state is a result of `get_state()`."""
        return {
            "torch": self._torch,
            "devices": {str(device): state for device, state in self._devices.items()},
            "python": self._python,
            "numpy": self._numpy.whole if self._numpy is not None else None,
        }

    def later(self, seed: int) -> GeneratorStates:
        """Seed accelerators that were first used after this object was created, and return the current states."""
        _seed_devices([device for device in _used_devices() if device not in self._devices], seed)
        return GeneratorStates()

    def give_back(self) -> None:
        """Set the generators to the saved states."""
        torch.set_rng_state(self._torch)
        for device, state in self._devices.items():
            _module(device).set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy.restore(self._numpy)


def _used_devices() -> Iterable[torch.device]:
    """Return all accelerators of this process; none if the process has not used any of them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not _module(accelerator).is_initialized():
        return ()
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def _seed_devices(devices: Iterable[torch.device], seed: int) -> None:
    for module in {_module(device) for device in devices}:
        module.manual_seed_all(seed)


def _module(device: torch.device) -> Any:
    """Return the module of torch that belongs to a kind of device, such as `torch.cuda`."""
    return torch.get_device_module(device)


class _NumpyState(NamedTuple):
    """A saved state of NumPy's global random generator.

    Attributes:
        whole: the state as returned by NumPy's `get_state`.
        raw: a copy of the generator's memory; None if restoring this memory is not enough, for example because a
            normal deviate is stored elsewhere.
    """

    whole: dict[str, Any]
    raw: bytes | None


class _NumpyGenerator:
    """Saves and restores the state of NumPy's global generator, if possible by accessing its memory directly."""

    def __init__(self) -> None:
        self._seen: _NumpyState | None = None  # the state when it was last read or restored
        self._bits: Any = None  # the bit generator whose memory is at `_address`
        self._address = 0

    def state(self) -> _NumpyState:
        """Return the current state."""
        if not self._unchanged():
            whole = sys.modules["numpy"].random.get_state(legacy=False)
            self._bits = sys.modules["numpy"].random.get_bit_generator()
            self._address = self._bits.ctypes.state_address
            plain = whole["bit_generator"] == "MT19937" and not whole["has_gauss"]
            self._seen = _NumpyState(whole, self._raw(whole) if plain else None)
        assert self._seen is not None
        return self._seen

    def restore(self, state: _NumpyState) -> None:
        """Restore a state. Writing to the memory is not sufficient if the current state may have a stored deviate."""
        if state.raw is not None and self._unchanged():
            with self._bits.lock:
                ctypes.memmove(self._address, state.raw, _RAW_BYTES)
        else:
            sys.modules["numpy"].random.set_state(state.whole)
        self._seen = state

    def _unchanged(self) -> bool:
        """Return True if the memory still contains the state that was last read or restored.

        Return False if this state has a stored deviate.
        """
        return (
            self._seen is not None
            and self._seen.raw is not None
            and sys.modules["numpy"].random.get_bit_generator() is self._bits
            and self._memory() == self._seen.raw
        )

    def _raw(self, whole: dict[str, Any]) -> bytes | None:
        """Return a copy of the generator's memory, or None if this version of NumPy uses a different layout."""
        raw = self._memory()
        key, position = whole["state"]["key"], whole["state"]["pos"]
        same = raw == key.tobytes() + position.to_bytes(_RAW_BYTES - _KEY_BYTES, sys.byteorder)
        return raw if same else None

    def _memory(self) -> bytes:
        with self._bits.lock:
            return ctypes.string_at(self._address, _RAW_BYTES)


_numpy = _NumpyGenerator()

_seeded: WeakSet[Session] = WeakSet()


def seed_worker(session: Session) -> None:
    """Give a worker its own random numbers, so that dropout, augmentation and noise differ between workers.

    The first call for each session seeds the generators from (seed, worker). Worker 0 keeps its generators as they
    are, so it draws the same numbers as the script does outside a run.
    """
    if session in _seeded:
        return
    _seeded.add(session)
    if session.worker > 0:
        seed = int(uniform(session.seed, session.worker, OF_WORKER) * 2**53)
        with generators_lock:
            GeneratorStates.seeded(seed).give_back()
            if session.device.type != "cpu":  # the script may use the device only later
                _seed_devices([session.device], seed)


def loader_seed(session: Session, epoch: int) -> int:
    """Return the seed from which a worker's loader seeds its processes in an epoch."""
    return int(uniform(session.seed, session.worker, OF_LOADER, epoch) * 2**53)
