"""`python -m benchmarks overlap`: how much overlap synchronization and even slicing save on slow links."""
