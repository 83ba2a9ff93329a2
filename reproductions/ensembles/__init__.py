"""Training of many runs at once along a recorded schedule.

- `schedules`: who pushes when, on which weights and which data. Recorded once, in a simulation without a network.
- `problems`: what is minimized, as functions of stacked parameters. `networks`: makes any `torch.nn` network a problem.
- `training`: trains all rates and seeds along one schedule, with raw and translated hyper-parameters.
"""
