"""The interface for training scripts: the distributed optimizer, the distributed loader, and the worker's session."""
