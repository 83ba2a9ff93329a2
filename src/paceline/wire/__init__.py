"""What travels between processes, and how: messages, framed streams, shared memory.

Knows bytes and addresses. Knows no tensor, no sync model's decision, no process's life.
"""
