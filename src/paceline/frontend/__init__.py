"""What a training script uses: the distributed optimizer, the distributed loader, and the session of its worker."""
