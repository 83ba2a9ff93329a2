"""Hashes of frozen parameters: those that no optimizer trains.

Every worker loads the frozen parameters itself, for example from a checkpoint. So that a base model of gigabytes does
not travel, workers compare hashes, and a server keeps only those. A value is sent only if a worker's hash differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import torch

from .buffer_bytes import lent_bytes
from .vectors import dtype_name

__all__ = ["DIGITS", "chunks", "digest_of", "digests_of"]

CHUNK_BYTES = 16 * 2**20
"""Maximum size of the part of a tensor that is copied from a device at a time."""

DIGITS = 64
"""Number of hexadecimal digits of a digest."""


def chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Return the bytes of a tensor, in parts of at most `CHUNK_BYTES`. Parts of a contiguous CPU tensor are views."""
    values = tensor.detach().reshape(-1)
    for part in values.split(max(1, CHUNK_BYTES // values.itemsize)) if values.numel() else ():
        yield lent_bytes(part.cpu())


def digest_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 hash of the dtype, the shape and the bytes of a tensor, as hexadecimal digits.

    Example:
        >>> digest_of(torch.zeros(2)) == digest_of(torch.zeros(2))
        True
        >>> digest_of(torch.zeros(2)) == digest_of(torch.zeros(2, 1))
        False
    """
    hashed = sha256(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
    for part in chunks(tensor):
        hashed.update(part)
    return hashed.hexdigest()


def digests_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the digest of each tensor. Tied tensors are hashed once, and several tensors at the same time."""
    distinct = {id(tensor): tensor for tensor in tensors}
    with ThreadPoolExecutor(torch.get_num_threads(), "paceline-digests") as pool:
        found = dict(zip(distinct, pool.map(digest_of, distinct.values()), strict=True))
    return [found[id(tensor)] for tensor in tensors]
