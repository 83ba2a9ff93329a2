"""A comparison of sync models that separates what is certain from what is noise.

- `places`: the simulated clusters, and the contenders with their own parameters.
- `schedules`: who pushes when, and on which version. A schedule depends on no weights, so it is recorded once.
- `quadratics`: noisy quadratics, for which the expected loss follows exactly from a schedule.
- `batched`: trains any problem along a recorded schedule, with all learning rates together.
- `language`, `images`, `factors`: problems with real data, for `batched`.
- `protocol`: how settings are tuned and evaluated.
- `study`: runs the protocol cell by cell, and continues where it was stopped.
"""
