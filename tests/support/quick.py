"""Which files of tests belong to `make quick`: those that test pure code, in little time.

A file is left out if it imports torch, or a part of Paceline or of these tests that trains, connects or starts
processes. So is a file that takes long (`LONG_FILES`). Nothing needs to be said in the files themselves.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

__all__ = ["LONG_FILES", "QUICK", "forbid_processes", "is_quick"]

QUICK = bool(os.environ.get("PACELINE_QUICK"))
"""True in `make quick`."""

LONG_FILES = (
    "test_resuming.py",
    "test_exhaustive.py",
    "test_cli.py",
    "test_training.py",
    "test_study.py",
    "test_exhaustive_search.py",
    "test_ported_scripts.py",
    "test_joining.py",
    "test_ranking.py",
    "test_sync_live.py",
    "test_conformance.py",
    "test_live.py",
    "test_later_sets.py",
    "test_mixed_precision.py",
    "test_schedules.py",
    "test_hosts.py",
    "test_ends.py",
    "test_starting.py",
    "test_losing_machines.py",
    "test_segments.py",
    "test_agreement.py",
    "test_torchrun.py",
    "test_testing.py",
    "test_outlets_live.py",
    "test_elastic_bsp_cluster.py",
    "test_sim_training.py",
    "test_fuzz.py",
    "test_staging.py",
    "test_same_accuracy.py",
    "test_own_model.py",
    "test_batch_sizes.py",
    "test_auto.py",
    "test_keyframes.py",
    "test_run_lock.py",
    "test_data_ledger.py",
    "test_properties.py",
    "test_identities.py",
    "test_demo.py",
    "test_resumed_scripts.py",
    "test_exhibits.py",
    "test_devices.py",
    "test_extension.py",
    "test_one_shard.py",
    "test_slurm.py",
    "test_states_of_cores.py",
    "test_joined_servers.py",
    "test_zipline.py",
    "test_fluentps_paper.py",
    "test_translation_theory.py",
    "test_output.py",
    "test_hosts_of_cores.py",
    "test_ticks.py",
    "test_terminal.py",
    "test_many_joins.py",
    "test_stress.py",
    "test_activity.py",
    "test_transport.py",
    "test_footprint.py",
    "test_namespaces.py",
    "test_liveness.py",
    "test_ssp.py",
    "test_overlap.py",
    "test_siege.py",
    "test_chaos.py",
)
"""The files that take longer than about five seconds in `make test` or `make thorough`. The longest in `make test` come
first."""

IMPURE = re.compile(
    r"""
    ^\s*(?:from|import)\s+(?:
        torch | subprocess | multiprocessing | concurrent | benchmarks | reproductions
        | tests\.support(?:\.|\s+import\s+)(?:
            live | served | shown | emulated | scheduled | listening | closed_door | screens | slurm
        )
        | paceline\.(?:shard|wire|train|run|start|cli|lab(?!\.studies)|look\.(?:show_process|dashboard|http))
    )\b
    | \brun_on_threads\b
    """,
    re.MULTILINE | re.VERBOSE,
)

STARTS = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")


def is_quick(path: Path) -> bool:
    """Return True if a file of tests belongs to `make quick`."""
    return path.name not in LONG_FILES and IMPURE.search(path.read_text()) is None


def forbid_processes(event: str, arguments: tuple[Any, ...]) -> None:
    """As an audit hook, let no process be started."""
    if event in STARTS:
        raise RuntimeError(
            f"a test of `make quick` starts a process ({event}). Import what starts the process under its own name, "
            "so that tests/support/quick.py leaves the file out."
        )
