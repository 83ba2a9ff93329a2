"""`python -m benchmarks zipline`: waiting times and computation times of ZipLine's methods."""
