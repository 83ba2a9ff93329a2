"""What scripts have logged, and what workers have spent their time on."""
