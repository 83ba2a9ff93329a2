"""`python -m benchmarks overlap`: the time saved on slow links by overlap synchronization and by even slicing."""
