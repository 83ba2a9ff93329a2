"""The work that is the same for all systems: the text, the model, the paced step, and what a worker records.

A worker is a program on a machine of its own, which imports this module, torch and the system that is measured. This
module imports nothing of Paceline, so a worker of another system does not import Paceline either. The environment
variable `PEERS_TASK` contains the `Task` of a worker as JSON. `PEERS_MACHINE` is the index of the worker's machine.

*Pace.* A step sleeps for a time in proportion to its number of samples, and then computes. The sleep stands for the
computation of a large model; the real computation is short compared with it. No system can hide the exchange of its
gradients behind the sleep.

*What a worker records.* All workers append events to a file of their machine. The worker on machine 0 also saves the
weights that its system has agreed on, at most every `SNAPSHOT_S`. *Agreed* weights are those that the workers share, in
contrast to weights after local steps of one worker. Under hivemind with local updates, the peers never have the same
weights, so the weights after each step of the peer on machine 0 are saved. Under Paceline asp, the weights are those
that the worker on machine 0 has received last. The launcher evaluates the saved weights while the workers go on, so no
system spends time on evaluation.

*Samples lost.* A worker records the number of samples of each step. A worker also records when all its samples so far
have had a part in the weights that the system has agreed on (`kept`), and when the system has given up the samples
since then (`discarded`). See `lost_samples`.
"""

from __future__ import annotations

import json
import os
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

CONTEXT = 32  # bytes of text in a sample
WIDTH, LAYERS, HEADS = 64, 2, 4
WORKERS = 3
JOINT_BATCH = 42
PACE_S = 0.01  # time that a sample takes on a machine that is not slow
TESTED = 512  # samples of the validation
SNAPSHOT_S = 0.2
READY_S = 300.0  # longest time to wait for the other workers at the start
LOOK_S = 0.01


@dataclass(frozen=True)
class Task:
    """The task of the workers of a run.

    Attributes:
        system: name of the system.
        folder: directory for events and weights, which all machines share.
        addresses: address of each machine.
        slowness: for each machine, how many times slower it computes than the fastest machine.
        lr: learning rate of AdamW.
        seed: random seed of the initial weights and of the samples.
        slow_link: True if the system should send fewer bytes, by the means that its documentation describes.
        again: True in a worker that takes the place of a killed worker.
    """

    system: str
    folder: str
    addresses: tuple[str, ...]
    slowness: tuple[float, ...]
    lr: float
    seed: int
    slow_link: bool = False
    again: bool = False

    @classmethod
    def given(cls) -> Task:
        """Return the task of this process."""
        fields = json.loads(os.environ["PEERS_TASK"])
        return cls(**{**fields, "addresses": (*fields["addresses"],), "slowness": (*fields["slowness"],)})


class LanguageModel(nn.Module):
    """A transformer that predicts the next byte, with about 120,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next bytes. Shapes: (samples, CONTEXT), (samples, CONTEXT, 256)."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.embedding(x) + self.position
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        scores: Tensor = self.norm(x) @ self.embedding.weight.T
        return scores


def new_model(seed: int) -> LanguageModel:
    """Return the model with the same initial weights in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return LanguageModel()


def new_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return the optimizer that all systems use, at their workers or servers."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def loss_of(model: nn.Module, samples: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte. Shape of the samples: (samples, CONTEXT + 1)."""
    return functional.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())


def library_text() -> Tensor:
    """Return the sources of Python's standard library, without its packages, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class Text(Dataset[Tensor]):
    """Samples of the standard library's text. The last samples are for validation, and never trained on."""

    def __init__(self) -> None:
        text = library_text()
        held_back = TESTED * (CONTEXT + 1)
        self._trained, self._tested = text[:-held_back], text[-held_back:]

    def __len__(self) -> int:
        return len(self._trained) - CONTEXT

    def __getitem__(self, at: int) -> Tensor:
        return self._trained[at : at + CONTEXT + 1].long()

    def validation(self) -> Tensor:
        """Return the samples of the validation. Shape: (TESTED, CONTEXT + 1)."""
        return self._tested.view(TESTED, CONTEXT + 1).long()

    def batches(self, seed: int, machine: int, size: int) -> Iterator[Tensor]:
        """Draw batches without end. Each machine draws different batches."""
        generator = torch.Generator().manual_seed(1000 * seed + machine)
        while True:
            drawn = torch.randint(len(self), (size,), generator=generator)
            yield torch.stack([self[int(at)] for at in drawn])


def shares(slowness: Iterable[float], joint: int = JOINT_BATCH) -> list[int]:
    """Divide a joint batch in proportion to the machines' speeds.

    >>> shares([1, 1, 1]), shares([1, 1, 3])
    ([14, 14, 14], [18, 18, 6])
    """
    speeds = [1 / each for each in slowness]
    sizes = [int(joint * speed / sum(speeds) + 1e-9) for speed in speeds]
    for index in range(joint - sum(sizes)):
        sizes[index] += 1
    return sizes


class Worker:
    """The worker of this process: its pace, and what it records.

    Args:
        task: the task of the run.

    Attributes:
        machine: index of its machine.
        share: number of samples of an equal share of the joint batch.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.machine = int(os.environ["PEERS_MACHINE"])
        self.share = JOINT_BATCH // WORKERS
        self._folder = Path(task.folder)
        self._saved, self._saved_s = 0, 0.0

    @property
    def ended(self) -> bool:
        """True if the launcher wants the run to end."""
        return (self._folder / "end").exists()

    def begin(self) -> None:
        """Wait until all workers can make their first step, and start the clock. A returning worker does not wait."""
        self._tell("ready")
        if not self.task.again:
            (self._folder / f"ready-{self.machine}").touch()
            deadline_s = time.monotonic() + READY_S
            while len([*self._folder.glob("ready-*")]) < WORKERS:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"not all of {WORKERS} workers were ready after {READY_S:g} s")
                time.sleep(LOOK_S)
        self._tell("begun")

    def pace(self, samples: int) -> None:
        """Sleep for as long as a computation with this many samples takes on this machine."""
        time.sleep(PACE_S * samples * self.task.slowness[self.machine])

    def computed(self, samples: int) -> None:
        """Record that a gradient of this many samples was computed."""
        self._tell("computed", samples)

    def kept(self) -> None:
        """Record that all samples so far have had a part in the weights that the system has agreed on."""
        self._tell("kept")

    def discarded(self) -> None:
        """Record that the system has discarded all samples since the last call of `kept`."""
        self._tell("discarded")

    def save(self, model: nn.Module) -> None:
        """On machine 0, save the weights that the system has agreed on, at most every `SNAPSHOT_S` seconds."""
        now_s = time.monotonic()
        if self.machine == 0 and now_s >= self._saved_s + SNAPSHOT_S:
            self._saved, self._saved_s = self._saved + 1, now_s
            hidden = self._folder / "weights.part"
            torch.save({"at_s": now_s, "weights": model.state_dict()}, hidden)
            hidden.rename(self._folder / f"weights-{self._saved:05}.pt")

    def publish(self, name: str, text: str) -> None:
        """Atomically write a file for which other machines wait."""
        (self._folder / f".{name}").write_text(text)
        (self._folder / f".{name}").rename(self._folder / name)

    def awaited(self, name: str) -> str:
        """Wait until another machine has published a file, and return its text."""
        deadline_s = time.monotonic() + READY_S
        while not (self._folder / name).exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the file {name!r} was not there after {READY_S:g} s")
            time.sleep(LOOK_S)
        return (self._folder / name).read_text()

    def _tell(self, event: str, samples: int = 0) -> None:
        told = {"at_s": time.monotonic(), "event": event, "samples": samples}
        with (self._folder / f"events-{self.machine}.jsonl").open("a") as events:
            events.write(json.dumps(told) + "\n")


def lost_samples(events: Iterable[Mapping[str, Any]]) -> int:
    """Return how many samples of a machine's workers have had no part in the weights that the system has agreed on.

    If a new worker becomes ready on the machine, the earlier worker was killed, and the samples of the earlier worker
    since its last `kept` are lost. The samples that are pending at the end of the run are not counted.

    >>> told = [("ready", 0), ("computed", 7), ("kept", 0), ("computed", 7), ("ready", 0), ("computed", 5)]
    >>> lost_samples({"event": event, "samples": samples} for event, samples in told)
    7
    """
    lost = pending = 0
    for each in events:
        pending += each["samples"]
        if each["event"] in ("ready", "discarded"):
            lost += pending
        if each["event"] in ("ready", "discarded", "kept"):
            pending = 0
    return lost
