"""How the benchmark on accelerators reads the profiler's timeline."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accelerator import copies_of


def event(category: str, name: str, begin: float, length: float, stream: int) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": begin, "dur": length, "args": {"stream": stream}}


def test_a_copy_is_hidden_while_a_kernel_of_the_training_runs() -> None:
    events = [
        event("kernel", "matmul", 0, 100, stream=7),
        event("kernel", "matmul", 110, 10, stream=7),
        event("kernel", "checksum", 100, 10, stream=9),  # belongs to the copies
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 80, 40, stream=9),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 200, 50, stream=9),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 50, stream=9),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 300},
    ]
    found = copies_of(events)
    assert found["DtoH"] == pytest.approx((40e-6, 0.75))
    assert found["HtoD"] == pytest.approx((50e-6, 0.0))


def test_a_timeline_without_kernels_has_no_copies() -> None:
    assert copies_of([]) == {"DtoH": (0.0, 0.0), "HtoD": (0.0, 0.0)}
