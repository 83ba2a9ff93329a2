"""`paceline simulate` and `paceline advise`: comparisons of sync models in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigurationError
from ..settings import SETTINGS
from ..start.terminal import plain_console, print_sentence
from .console import (
    counting,
    interruptible,
    load_named_models,
    new_folder,
    print_json,
    require_no_folder_of_runs,
)
from .options import (
    AsJson,
    ChangedBandwidth,
    ChangedServers,
    ChangedSlow,
    ChangedWorkers,
    ModelImports,
    Out,
    RecordedBandwidth,
    SimulatedWire,
    Trusted,
    whole_number_option,
)


def simulate(
    cluster: Annotated[
        str,
        typer.Argument(
            help="Cluster file (TOML), the directory of a recorded run, or the name of a cluster from the papers: "
            "elastic-bsp, spec-sync-1, ...",
            show_default=False,
        ),
    ],
    sync: Annotated[
        str,
        typer.Option(
            "--sync",
            metavar="NAME:KEY=VALUE,...",
            help="Sync models to compare, separated by commas: bsp,ssp:staleness=3,elastic-bsp. "
            "'all' compares ten models with the parameters from their papers.",
        ),
    ] = "all",
    iterations: Annotated[
        int,
        whole_number_option(
            "--iterations",
            least=1,
            help="Length of the simulation: every model runs for as long as bsp needs for this many iterations.",
        ),
    ] = 100,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="KEY=FROM..TO",
            help="Compare several values of one parameter of the sync models: lookahead=5..480 (doubling), "
            "staleness=1..9:2 (steps of 2) or staleness=1,5,20.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        whole_number_option(
            "--samples",
            least=1,
            help="Number of samples in an epoch. If given, every model runs for whole epochs instead of a fixed time, "
            "with equal and with balanced batches, and the models are ranked by the time per epoch.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int,
        whole_number_option(
            "--batch-size",
            least=1,
            help="Samples in a worker's batch, or in a joint batch with --joint-batch. Only with --samples.",
        ),
    ] = 32,
    joint_batch: Annotated[
        bool,
        typer.Option(
            "--joint-batch",
            help="The batch size is the size of the joint batch, which is divided among the workers, as for paceline "
            "run. The compute times of the cluster are for undivided batches. Only with --samples or --script.",
        ),
    ] = False,
    script: Annotated[
        str | None,
        typer.Option(
            "--script",
            metavar="'train.py ARGS'",
            help="Training script, with its arguments. The script is run in virtual time under each sync model, and "
            "the losses are compared. The script writes its files as in a live run, and replaces files of the same "
            "names.",
            show_default=False,
        ),
    ] = None,
    hyperparameters: Annotated[
        str,
        typer.Option(
            "--hyperparameters",
            metavar="<raw|translated>",
            help="What the learning rate and other hyper-parameters of the script mean, as for paceline run. Only "
            "with --script.",
        ),
    ] = "translated",
    shards: Annotated[
        int | None,
        whole_number_option(
            "--shards", least=1, help="Number of shards. Default: one per server.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, whole_number_option("--seed", least=0, help="Random seed.")] = 0,
    workers: ChangedWorkers = None,
    servers: ChangedServers = None,
    bandwidth: ChangedBandwidth = None,
    slow: ChangedSlow = None,
    recorded_bandwidth: RecordedBandwidth = None,
    wire: SimulatedWire = None,
    imports: ModelImports = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare the speed, staleness and waiting time of sync models on a simulated cluster, and recommend what to use.

    paceline simulate cluster.toml --sync bsp,ssp:staleness=3,elastic-bsp
    """
    import math
    import shlex

    import msgspec

    from ..core.layout import WireFormat
    from ..lab import comparison, ranking
    from ..lab.clusters import Changes, load_cluster
    from ..look.timelines import can_draw
    from ..run.job_options import require_script
    from ..sim import Dataset

    if samples is not None and (sweep is not None or script is not None):
        raise ConfigurationError(
            "--samples cannot be combined with --sweep or --script; give only one of them."
        )
    if joint_batch and samples is None and script is None:
        raise ConfigurationError(
            "--joint-batch divides the batches of data, but there are none without --samples or --script. Give one "
            "of them, or omit --joint-batch."
        )
    if sweep is not None and script is not None:
        raise ConfigurationError("--sweep and --script cannot be combined; give one of them.")
    try:
        path, *arguments = shlex.split(script or "") or [""]
    except ValueError as error:
        raise ConfigurationError(f"--script {script!r} cannot be parsed: {error}.") from error
    SETTINGS["hyperparameters"].value(hyperparameters)
    if script is not None:
        require_script(Path(path))
    changes = Changes(
        workers=workers,
        servers=servers,
        bandwidth=bandwidth,
        slow=slow,
        recorded_bandwidth=recorded_bandwidth,
    )
    wire = str(WireFormat.read(wire or "float32"))
    machines = changes.made(load_cluster(cluster, recorded_bandwidth))
    load_named_models(sync, imports)
    syncs = ranking.read_syncs(sync)
    swept = ranking.sweep_values(sweep) if sweep is not None else None
    variants = syncs if swept is None else [name for _, name in ranking.variants(syncs, *swept)]
    ranking.require_runnable(machines, variants, shards)
    data = None
    if samples is not None:
        if samples < machines.workers:
            raise ConfigurationError(
                f"--samples is {samples}, but the cluster has {machines.workers} workers, and each of them needs at "
                "least one sample."
            )
        data = Dataset(samples=samples, batch_size=batch_size, joint_batch=joint_batch)
        if joint_batch and batch_size < machines.workers:
            raise ConfigurationError(
                f"--batch-size is {batch_size}, and --joint-batch divides it among {machines.workers} workers, each "
                "of which needs at least one sample. Use a larger batch size, or fewer workers."
            )
        data = msgspec.structs.replace(data, epochs=math.ceil(iterations / data.rounds(machines.workers)))
    folder = new_folder(out, "simulate")
    console = plain_console(quiet=as_json)
    with interruptible("no results were saved, and all processes have ended"), counting() as tell:
        result: object
        if script is not None:
            print_sentence(
                console,
                f"{path} writes its files as in a live run, and replaces files of the same names. To keep the files of "
                "earlier runs, give the script other file names, for example with its arguments, or start this command "
                "in another directory.",
            )
            result = comparison.train_and_compare(
                machines,
                syncs,
                Path(path),
                arguments,
                seed=seed,
                shards=shards,
                hyperparameters=hyperparameters,
                joint_batch=joint_batch,
                wire=wire,
                out=folder,
                console=console,
                tell=tell,
            )
        elif swept is None:
            result = comparison.compare(
                machines,
                syncs,
                iterations=iterations,
                seed=seed,
                shards=shards,
                data=data,
                wire=wire,
                source=cluster,
                changes=changes,
                out=folder,
                console=console,
                tell=tell,
            )
        else:
            result = comparison.explore_models(
                machines,
                syncs,
                *swept,
                iterations=iterations,
                seed=seed,
                shards=shards,
                wire=wire,
                source=cluster,
                changes=changes,
                out=folder,
                console=console,
                tell=tell,
            )
    if as_json:
        print_json(result)
    else:
        print(f"{'pictures and JSON files' if can_draw() else 'JSON files'}: {folder}")


def advise(
    run_dir: Annotated[
        Path, typer.Argument(help="Directory of a finished run.", show_default=False, metavar="RUN_DIR")
    ],
    sync: Annotated[
        str,
        typer.Option(
            "--sync",
            metavar="NAME:KEY=VALUE,...",
            help="Sync models to compare, separated by commas. 'all' compares ten models.",
        ),
    ] = "all",
    workers: ChangedWorkers = None,
    servers: ChangedServers = None,
    bandwidth: ChangedBandwidth = None,
    slow: ChangedSlow = None,
    recorded_bandwidth: RecordedBandwidth = None,
    wire: SimulatedWire = None,
    imports: ModelImports = None,
    trust: Trusted = False,
    as_json: AsJson = False,
) -> None:
    """Recommend sync models for the machines of a run by simulating several models with the times recorded in that run.

    paceline advise runs/20261121-120000
    """
    from ..core.layout import WireFormat
    from ..lab import advice
    from ..lab.clusters import Changes
    from ..lab.ranking import read_syncs
    from ..trace.recording import load_kept_models

    changes = Changes(
        workers=workers,
        servers=servers,
        bandwidth=bandwidth,
        slow=slow,
        recorded_bandwidth=recorded_bandwidth,
    )
    wire = None if wire is None else str(WireFormat.read(wire))
    require_no_folder_of_runs(run_dir, "advise")
    load_named_models("", imports)
    load_kept_models(run_dir, trust=trust)  # --sync may name models of the run
    load_named_models(sync, None)
    with interruptible("all processes have ended"), counting() as tell:
        report = advice.advise(run_dir, read_syncs(sync), tell, changes, wire)
    if as_json:
        print_json(report)
    else:
        advice.show(report, plain_console())
