"""The launcher, which starts the processes of a run, monitors them, and ends them.

`launch` is what users call, and `engines` says where the processes are placed. The rest stands in packages by
subject, each of which imports only from those above it:

    terminal     the screen, the logs, and the terminal that worker 0 uses
    processes    the processes of a run and the programs beside it: their start, what they are told, and their end
    live_run     a run on this machine, what it waits for, and its results
    clusters     runs on several machines, with Ray and with schedulers
"""
