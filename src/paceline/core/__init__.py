"""The protocol of a run, without I/O. Each kind of process (worker, server and coordinator) has a class, its *core*.

A core processes one message at a time, given the current time. It returns requests, and its host carries them out.

The cores are `worker`, `server` with its shards (`shard`), and `coordinator`. What they consist of stands in packages
by subject, each of which imports only from those above it:

    protocol     the messages, the values in them, their legal order, and the requests of the cores
    data         who has which batches of which epoch
    metrics      what scripts have logged, and what workers have spent their time on
    sync         the sync model at each shard and at the coordinator, and calls that all workers make together
    machines     who takes part in a run, who is lost, and what the clocks of the machines say
    oversight    what is watched in order to warn the user
    changes      joins, extensions and edits of the model, and how they exclude each other
                 (the cores themselves)
    status       the state of a run, for displays
"""
