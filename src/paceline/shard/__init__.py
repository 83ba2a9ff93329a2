"""The tensors of a shard: weights, optimizer state, pushed gradients and model buffers.

It knows flat vectors and PyTorch's optimizers, and nothing of workers, of the order of pushes, or of sockets.

Read first: `store`.

Imports from `errors`, `files`, `sync` and `core`.
"""
