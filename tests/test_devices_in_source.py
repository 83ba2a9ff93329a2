"""What the source may do with tensors that may be on a device."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent
STAGER = "train/weights.py"

OTHER_TENSORS = {
    "train/job_model.py": "notices changes of buffers by their address and version, and reads no memory",
    "shard/device_queue.py": "locks memory of the host, which a driver knows by its address",
    "train/generator_states.py": "writes the state of NumPy's generator, which is in the memory of the host",
    "train/collectives.py": "recognizes tensors that share memory by their address, and reads no memory",
    "integrations/accelerate.py": "recognizes tied tensors by their address, and reads no memory",
    "integrations/lightning.py": "notices new values of metrics by their address, and reads no memory",
    "start/processes/program.py": "writes the title of the process",
}
"""Files that use addresses of other memory than that of weights and gradients, and why they may."""

FLOAT64_ON_THE_HOST = {
    "train/collectives.py": "numbers that have been copied to the host before",
}
"""Files of the front end that make float64 of tensors that are on the host, and why they are there."""


def uses(node: ast.AST) -> bool:
    """Return True if a part of a program uses the address of memory, or gives a tensor other memory."""
    if isinstance(node, ast.Assign):
        targets = [each for each in node.targets if isinstance(each, ast.Attribute) and each.attr == "data"]
        return any(not (isinstance(each.value, ast.Name) and each.value.id == "self") for each in targets)
    return isinstance(node, ast.Attribute) and node.attr in ("data_ptr", "memmove")


def test_weights_and_gradients_change_memory_in_the_stager_alone() -> None:
    found = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if any(map(uses, ast.walk(ast.parse(file.read_text()))))
    }
    assert found == {STAGER, *OTHER_TENSORS}


def lines_with_float64(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if re.search(r"torch\.float64|\.double\(\)", line)]


def test_nothing_that_may_be_on_a_device_becomes_float64() -> None:
    files = [*(SOURCE / "train").rglob("*.py"), SOURCE / "shard" / "lars.py"]
    found = {str(file.relative_to(SOURCE)): lines for file in files if (lines := lines_with_float64(file))}
    assert set(found) == set(FLOAT64_ON_THE_HOST)
    assert all(".cpu()" in line or "torch.tensor(" in line for lines in found.values() for line in lines)


def test_what_they_call_with_tensors_on_a_device_looks_where_these_are() -> None:
    """`l2_norm` makes float64 of tensors on the CPU only, `digest` copies tensors to the host before."""
    norm, _, hashed, *_ = lines_with_float64(SOURCE / "shard" / "vectors.py")
    assert "if tensor.is_cpu" in norm
    assert ".cpu().to(torch.float64)" in hashed
