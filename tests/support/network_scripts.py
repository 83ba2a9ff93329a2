"""Scripted tests of whole runs: texts with commands for a network, and the expected result of each command.

The form is that of `paceline.testing.scripts`. The names of processes are those of `network`.

    > network SYNC workers=N [servers=N] [shards=N] [most=N] [pause_below=N]      start with a new run
    > settle                       deliver all messages in the order in which they were sent; show what comes of it
    > show                         the same, and show every message
    > deliver SENDER RECEIVER [NUMBER]         deliver the first message of a connection
    > deliver-all SENDER RECEIVER [NUMBER]     deliver all messages of a connection that are in flight
    > fire                         fire the timer that is due first
    > push WORKER | skip WORKER | again WORKER | finish WORKER
    > change WORKER SYNC | extend WORKER NUMBER | barrier WORKER | stand-in WORKER
    > join                         invite a worker
    > cut                          cut the job, so that a later run can resume it
    > crash WORKER [RECEIVER:N]    end a process. N of its last messages to a receiver are lost
    > hang WORKER                  let a process be silent
    > take-out WORKER              let the coordinator continue without a worker
    > drop WORKER SERVER           end the connection between a worker and a server
    > lose SERVER                  end the process of a server
    > in flight                    list the messages in flight
    > who                          what each worker waits for, and who takes part
    > what changes                 the reconfigurations that are in progress or wait
    > the end                      check that nobody waits, and that everything is accounted for
"""

from __future__ import annotations

from typing import Any

from paceline.testing.scripts import rewritten
from tests.support.network import Network, describe

__all__ = ["play_network"]


def play_network(script: str) -> str:
    """Execute the commands in a script, and return the script with the actual result of each command.

    >>> print(play_network("> network asp workers=1\\n> settle\\n> push w0\\n> settle"))
    > network asp workers=1
    > settle
            w0 goes on with iteration 0
    > push w0
    > settle
            shard 0 applies 0:0
            w0 goes on with iteration 1
    <BLANKLINE>
    """
    return rewritten(script, _Stage().perform)


class _Stage:
    """Executes the commands of one script, and stores its network."""

    def __init__(self) -> None:
        self._network: Network

    def perform(self, command: str) -> list[str]:
        """Execute one command and return its result as a list of lines."""
        match command.split():
            case ["network", sync, *options]:
                numbers: dict[str, Any] = {
                    name: int(number) for name, number in (each.split("=") for each in options)
                }
                self._network = Network(sync, **numbers)
                return []
            case ["settle" | "show" as how]:
                self._network.settle()
                told = self._told()
                return told if how == "show" else [line for line in told if line.startswith(" ")]
            case ["deliver-all", *ends]:
                sender, receiver, number = (*ends, "0")[:3]
                for _ in range(len(self._network.channels[sender, receiver, number])):
                    self._network.take(("deliver", *ends))
                return self._told()
            case ["in", "flight"]:
                return [
                    f"{sender} > {receiver} " + ", ".join(describe(message) for _, message in channel)
                    for (sender, receiver, _), channel in self._network.channels.items()
                    if channel
                ] or ["nothing"]
            case ["who"]:
                present = sorted(self._network.coordinator.members.present)
                return [*map(str, self._network.workers.values()), f"present: {present}"]
            case ["what", "changes"]:
                queue = self._network.coordinator.reconfigurations
                kinds = sorted(queue.in_progress)
                return [f"in progress: {', '.join(kinds) or 'nothing'}; to join: {queue.joining}"]
            case ["the", "end"]:
                self._network.check_end()
                return [self._network.over or "nobody waits"]
            case step:
                self._network.take(tuple(step))
                self._network.validate()
                return self._told()

    def _told(self) -> list[str]:
        told, self._network.told = self._network.told, []
        return told
