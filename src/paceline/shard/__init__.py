"""The tensors of a shard: weights, optimizer state, pushed gradients and model buffers.

This folder knows flat vectors and PyTorch's optimizers: which optimizers can run on slices or on whole tensors, and
how. It does not know who may push, in which order pushes are applied, or how pushes travel.

Read first: `store`, then `slice_optimizers`.

Imports from `errors`, `files`, `sync` and `core`.
"""
