"""The tensors of a shard: weights, optimizer state, pushed gradients and model buffers.

It knows flat vectors and PyTorch's optimizers: which of them can run on slices, and how. Who may push, in which order
pushes are applied, and how they travel is not known here.

Read first: `store`, then `slice_optimizers`.

Imports from `errors`, `files`, `sync` and `core`.
"""
