"""What the demo trains: real data, a small network, and how a comparison of sync models is run."""
