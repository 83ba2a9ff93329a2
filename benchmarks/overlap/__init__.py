"""`python -m benchmarks overlap`: how much time overlap synchronization and even slicing save on slow links."""
