"""The messages between the processes of a run.

On a connection, a message is a small MessagePack header, followed by its payload: raw binary data, such as slices of
weights and gradients. Each side decodes only the messages that its peer may send now; see `table`. In virtual
time, the same objects are passed without encoding. Indices and counts that a worker or a reader sends have the type
`Number`, which limits their range.

The messages are grouped by subject, one module each. Each class states who sends the message to whom, and when. The
table of all messages is in docs/internals/messages.md. Other packages import the messages from this package.

A message that becomes an event at its receiver has the same name as the event. The exception is `Commit`: it becomes
a push event and, if it includes a pull, a pull event. The fields that a message and its event have in common are
declared once, in a base class in `sync.events`, and `Event.of` copies them.
"""

from __future__ import annotations

from .connection import *
from .cuts import *
from .data import *
from .machines import *
from .membership import *
from .push import *
from .table import *
