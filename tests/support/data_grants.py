"""Answers requests for data from a ledger, as the coordinator does."""

from __future__ import annotations

from paceline.core.data_ledger import DataLedger
from paceline.core.messages import DataGranted, DataRequested
from paceline.core.requests import Request, Send

__all__ = ["granted"]


def granted(ledger: DataLedger, worker: int, workers: int, request: Request) -> DataGranted:
    """Return the answer to a worker's request for data.

    Args:
        ledger: the ledger.
        worker: index of the worker.
        workers: number of workers in the run.
        request: the request.
    """
    assert isinstance(request, Send)
    message = request.message
    assert isinstance(message, DataRequested)
    grant = ledger.request(worker, message, now_s=0.0, live=set(range(workers)), lockstep=True)
    return DataGranted(message.loader, message.epoch, grant.leases, grant.last)
