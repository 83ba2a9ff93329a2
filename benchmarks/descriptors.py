"""File descriptors: a benchmark with thousands of connections needs more than a process may usually open."""

from __future__ import annotations

import resource

from paceline.errors import ConfigurationError

__all__ = ["allow_descriptors"]


def allow_descriptors(needed: int) -> None:
    """Let this process open as many file descriptors as it needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigurationError(
            f"this process may open {hard} files, but the benchmark needs {needed}. Raise the limit with ulimit -Hn."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
