"""What is watched in order to warn the user: gradients, hyper-parameters, and divergence."""
