"""The processes of a live run: event loops that read the clock, pass events to state machines and perform actions.

The server, the coordinator, the session of a worker and the reader have one module each. These modules share `job`,
which contains the validated configuration of a run.
"""
