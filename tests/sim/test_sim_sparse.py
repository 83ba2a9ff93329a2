"""Sparse gradients in simulated training: the same weights as with dense gradients, and fewer bytes."""

from __future__ import annotations

import torch
from torch import nn

from paceline import DistributedOptimizer, worker_index
from paceline.sim import Cluster, SimResult, simulate

ROWS, SIZE, TOUCHED, ITERATIONS = 40, 4, 3, 5
CLUSTER = Cluster(
    compute_s=[1.0, 1.5]
)  # a network without delays, so that both runs have the same order of pushes


def train(sparse: bool) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, SIZE, sparse=sparse)
    optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), model=table)
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        first = 7 * iteration + 3 * worker_index()
        indices = torch.arange(first, first + TOUCHED) % ROWS
        (table(torch.cat([indices, indices])) - 1).square().sum().backward()
        optimizer.step()


def run(sparse: bool, cluster: Cluster = CLUSTER) -> SimResult:
    return simulate(cluster, "asp", train_fn=train, args=(sparse,))


def test_sparse_pushes_train_exactly_like_dense_ones() -> None:
    sparse, dense = run(True).state_dict, run(False).state_dict
    assert sparse is not None
    assert dense is not None
    assert torch.equal(sparse["weight"], dense["weight"])


def test_a_sparse_push_has_the_bytes_of_its_rows_and_their_indices() -> None:
    sparse, dense = run(True).bytes_by_kind, run(False).bytes_by_kind
    pushes = 2 * ITERATIONS
    assert dense["push"] - sparse["push"] == pushes * (ROWS * SIZE * 4 - TOUCHED * (8 + SIZE * 4))
    assert sparse["pull"] == dense["pull"]


def test_the_bytes_are_scaled_to_the_size_that_the_cluster_states() -> None:
    scaled = Cluster(compute_s=[1.0, 1.5], size_bytes=1000 * ROWS * SIZE * 4)
    pushes = [run(sparse, scaled).bytes_by_kind["push"] for sparse in (True, False)]
    assert pushes[1] - pushes[0] == 2 * ITERATIONS * 1000 * (ROWS * SIZE * 4 - TOUCHED * (8 + SIZE * 4))
