"""The tensors of a shard: weights, optimizer state, pushed gradients and model buffers."""
