"""The process that shows a run elsewhere while it goes on: on a live page, in TensorBoard, as OpenMetrics.

It is a process of its own with a low priority, and not a thread of the launcher, because the coordinator lives there.
The threads of a process take turns, so a stranger who sends requests could delay the coordinator, and with it all
workers. The process reads the files in the run directory, as `paceline report` does, and asks the coordinator for the
state of the job, as `paceline status` does. So nothing happens in the processes of the run while nobody looks.

The page and the metrics are served by asyncio with h11, which parses HTTP. `http.server` has a thread for each
connection and no limit for the time of a whole request; servers such as uvicorn have no such limit either.

    wanted       what the user wants, checked before anything starts
    orders       what the launcher tells the process
    program      the process
    live_report  the report of the run as of now
    door         pure: who may see the page
    http         a small HTTP server with limits
    dashboard    the live page
    openmetrics  the metrics for Prometheus
    tensorboard  the files for TensorBoard
"""
