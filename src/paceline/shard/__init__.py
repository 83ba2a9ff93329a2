"""The tensors of a shard: weights, optimizer state, pushed gradients, and the buffers of the model."""
