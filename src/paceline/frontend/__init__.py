"""What a training script uses: the distributed optimizer, its data, and the session that hosts a worker."""
