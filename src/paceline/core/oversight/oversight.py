"""What the coordinator watches in order to warn the user: gradients, hyper-parameters, and divergence.

Nothing here changes which worker waits. The guard may end the run or have a worker taken out (see `guard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from ...state import stateful
from ..protocol.messages import GradientHashed, HyperParametersReported, RateTempered
from ..protocol.requests import Fail, Request, Send, TakeOut, Warn, server_peer
from .agreement import Agreement
from .fingerprints import Fingerprints
from .guard import DIVERGED, Guard, Verdict

__all__ = ["Oversight"]


@stateful(decides="guard _fingerprints _agreement", history="findings")
class Oversight:
    """The observers of a run's workers.

    Args:
        guard: judges what the workers report of their pushes.

    Attributes:
        guard: the same.
        findings: sentences about what makes the result of the run worse than it could be.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.findings: list[str] = []
        self._fingerprints = Fingerprints()
        self._agreement = Agreement()

    def compare(self, worker: int, message: GradientHashed, live: Set[int], *, lockstep: bool) -> str:
        """Return a warning, once, if workers compute the same gradients; else ""."""
        return self._fingerprints.take(worker, message, live, lockstep=lockstep)

    def agree(self, worker: int, incarnation: int, message: HyperParametersReported) -> list[Request]:
        """Handle a worker's report of its hyper-parameters: warn if they differ from those of other workers."""
        finding = self._agreement.take(worker, incarnation, message)
        if not finding:
            return []
        self.findings.append(finding)
        return [Warn(finding)]

    def heed(self, verdict: Verdict, servers: Iterable[int]) -> list[Request]:
        """Return the requests that carry out a verdict of the guard. `servers` contains the connected servers."""
        self.findings.append(verdict.words)
        requests: list[Request] = [Warn(verdict.words)]
        if verdict.factor is not None:
            tempered = RateTempered(verdict.factor)
            requests += [Send(server_peer(server), tempered) for server in sorted(servers)]
        if verdict.takes_out is not None:
            requests.append(TakeOut(verdict.takes_out, verdict.words))
        if verdict.stops:
            requests.append(Fail(DIVERGED, verdict.words))
        return requests
