"""Which messages contain float32 values that are rounded on their way (see `core.protocol.wire_format`).

Only the usual exchange of a gradient for new weights is rounded. These values always travel as they are:

- the initial weights, on their way to the servers and to the workers, also after a late join or an extension;
- the values of an edit, the weights in the answer to it, and those that a worker pulls before it edits them;
- the weights that a worker pulls because its script evaluates the model;
- what readers receive, and so what a run saves;
- vectors with other dtypes, buffers and optimizer states.
"""

from __future__ import annotations

from .messages import Commit, PullRepeated, Stage
from .wire_format import WireFormat

__all__ = ["rounds_answer", "rounds_push"]


def rounds_push(wire: WireFormat, message: Commit | Stage) -> bool:
    """Return True if the pieces of a gradient in a message are rounded. The values of an edit are not."""
    return wire.gradients == "bf16" and not (isinstance(message, Commit) and message.edit is not None)


def rounds_answer(wire: WireFormat, request: Commit | PullRepeated) -> bool:
    """Return True if the weights with which a shard answers are rounded.

    They are if the worker computes its next gradient with them. They are not in the answer to an edit, and if the
    script evaluates or edits the model.
    """
    if wire.weights != "bf16":
        return False
    return request.edit is None and (isinstance(request, Commit) or request.restart)
