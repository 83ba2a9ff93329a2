"""`track`, which names objects whose state belongs to the job, such as a scheduler or averaged weights.

The states are sent to the server of shard 0 at the end of each epoch (see `paceline.epochs` and
`core.data_ledger`). A worker that joins a run in progress loads these states when its loop begins.
"""

from __future__ import annotations

from ..errors import UsageError
from ..shard.vectors import encode_states
from .optimizer import DistributedOptimizer
from .session import METHODS, Stateful, current
from .worker_state import Tracked, state_of, tracked_of


def track(**objects: Stateful) -> None:
    """Let the state of some objects belong to the job, so that a worker that joins late continues with it.

    A worker that joins a run in progress runs the script from its first line. It gets the weights and the model's
    buffers from the job, but other objects of its script are new: a learning-rate scheduler, averaged weights, a loss
    scaler. Call `track` with these objects after you have created them, and before the loop over `paceline.epochs`:

    - At the end of each epoch, one worker sends the states to a server: the worker with the lowest index of those that
      are in training. If this worker is lost, the worker that then has the lowest index sends the states from the next
      epoch on. The states at the end of the loop are sent by the first worker that ends the loop, and again by workers
      with lower indices. So these states are not lost if one worker is lost.
    - A worker that joins late loads the states when its loop over `paceline.epochs` begins. For a scheduler, it also
      takes over the hyper-parameters that the scheduler has set, such as the learning rate. The states are those at
      the beginning of the epoch in progress. If a scheduler was prepared with `paceline.prepare` and is stepped in
      every iteration, it then follows the job's position in the epoch.
    - The run writes the states that the server has received last to the file `tracked.pt` in the run directory,
      together with the number of epochs that were complete. `torch.load` reads this file.

    When a run is resumed, its first workers load the states that are in the checkpoint. The objects of all other
    workers that have not joined late are not changed. Outside a run, the function only checks the objects.

    Args:
        objects: objects with the methods `state_dict()` and `load_state_dict()`, by names of your choice. States may
            consist of numbers, strings, None, tensors and NumPy arrays, in dictionaries, lists and tuples; together,
            they have at most 1 GiB.

    Raises:
        UsageError: an object has no state, its state cannot be sent or is too large, its name is in use, or it is a
            distributed optimizer.

    Example:
        >>> import paceline, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
        >>> ema = torch.optim.swa_utils.AveragedModel(model)
        >>> paceline.track(scheduler=scheduler, ema=ema)
    """
    session = current()
    tracked = tracked_of(session) if session is not None else Tracked()
    for name, thing in objects.items():
        missing = [m for m in METHODS if not callable(getattr(thing, m, None))]
        if missing:
            raise UsageError(
                f"track() got {name}={type(thing).__name__}, which has no method {' and no method '.join(missing)}()."
            )
        if isinstance(thing, DistributedOptimizer):
            raise UsageError(
                f"track() got {name}={type(thing).__name__}, but the state of a distributed optimizer is kept by the "
                "servers. Track only what the script keeps itself, such as a scheduler."
            )
        if tracked.objects.get(name, thing) is not thing:
            raise UsageError(
                f"track() got {name}=..., but another object is tracked under this name. Choose another name."
            )
    together = {**tracked.objects, **objects}
    encode_states({name: state_of(thing) for name, thing in together.items()})
    tracked.objects = together
    tracked.load_into(objects)
