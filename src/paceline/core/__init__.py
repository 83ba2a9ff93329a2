"""The protocol without I/O: messages and the time go in, messages and requests to the host come out."""
