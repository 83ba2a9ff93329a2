"""What the exhibits of FluentPS say about the machines that they simulate."""

MACHINES = (
    "The paper does not say how much the speeds of its machines differ, although this affects the results most. "
    "The files in paceline/sim/presets describe the simulated machines, and mark numbers that are not in the paper."
)
