"""Cluster files: what they say, and what is said of those that are wrong."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from paceline.errors import ConfigurationError
from paceline.sim import Cluster, Constant, LogNormal, Occasional, Presence, Recorded, Uniform, simulate
from paceline.sim.cluster_file import PRESETS, SIZES, TIMES, quantity

WHOLE = """
name = "mixed"
servers = 4
bandwidth = "10 Gbit/s"
latency = "100 us"
parameters = "100 MB"

[[workers]]
count = 24
compute = "1.0 s"

[[workers]]
count = 7
compute = "1.6 s"
jitter = "20 %"

[[workers]]
compute.kind = "occasional"
compute.base = { kind = "log-normal", median = "1 s", sigma = 0.1 }
compute.factor = 3
compute.lasting = "10 s"
compute.every = "1 min"
lost_at = "300 s"
back_after = 60
bandwidth = "1 Gbit/s"
"""


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return Cluster.from_toml(path)


def test_a_few_lines_say_it_all(tmp_path: Path) -> None:
    cluster = read(tmp_path, WHOLE)
    assert (cluster.name, cluster.workers, cluster.servers) == ("mixed", 32, 4)
    assert (cluster.bandwidth_bps, cluster.size_bytes) == (1e10, 100_000_000)
    assert cluster.latency(0, to_server=True) == Constant(seconds=1e-4)
    assert cluster.compute(23) == Constant(seconds=1.0)
    assert cluster.compute(24) == Uniform(low=1.6 * 0.8, high=1.6 * 1.2)
    assert cluster.compute(31) == Occasional(
        base=LogNormal(median=1.0, sigma=0.1), factor=3, lasting=10.0, every=60.0
    )
    assert cluster.presence == {31: Presence(lost_at_s=300.0, back_after_s=60.0)}
    assert (cluster.bandwidth_of(0), cluster.bandwidth_of(31)) == (1e10, 1e9)


def test_what_is_left_out_costs_nothing(tmp_path: Path) -> None:
    cluster = read(tmp_path, "[[workers]]\ncompute = [1, '500 ms']\n")
    assert cluster.compute(0) == Recorded(seconds=(1.0, 0.5))
    assert (cluster.servers, cluster.bandwidth_bps, cluster.size_bytes) == (1, math.inf, 0)
    assert simulate(cluster, "bsp", iterations=4).time_s == 3.0


@pytest.mark.parametrize("name", PRESETS)
def test_the_clusters_of_the_papers_run(name: str) -> None:
    cluster = Cluster.preset(name)
    assert cluster.name
    assert simulate(cluster, "ssp:staleness=3", iterations=5).time_s > 0


def test_there_is_a_cluster_of_each_paper() -> None:
    assert {
        "elastic-bsp",
        "spec-sync-1",
        "spec-sync-2",
        "fluent-ps-32",
        "fluent-ps-64",
        "fluent-ps-128",
    } <= set(PRESETS)


def test_quantities_have_units() -> None:
    assert quantity("1.5 min", TIMES, "t") == 90.0
    assert quantity("2e3 MiB", SIZES, "s") == 2e3 * 2**20
    assert quantity(3, TIMES, "t") == 3.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("workers = 3", r"workers is 3, expected \[\[workers\]\] tables\."),
        ("servers = 1", r"expected either \[\[workers\]\] tables, or delays"),
        (
            "[[workers]]\ncompute = 1\nspeed = 2",
            r"unknown entry in workers\[0\] 'speed'\. Choices: back_after, bandwidth, compute",
        ),
        (
            "bandwith = 1\n[[workers]]\ncompute = 1",
            "unknown entry 'bandwith'; did you mean 'bandwidth'. Choices: apply, bandwidth",
        ),
        ("[[workers]]\ncompute = -1", r"workers\[0\].compute is -1, expected a number >= 0"),
        ("[[workers]]\ncompute = '-1 s'", r"workers\[0\].compute is '-1 s', expected"),
        (
            "[[workers]]\ncompute = '1 parsec'",
            r"'1 parsec', which has an unknown unit; expected one of ns, us",
        ),
        (
            "[[workers]]\ncompute = '400'",
            r"workers\[0\].compute is '400', which has no unit; expected one of ns, us, .*such as '400 s'\.",
        ),
        *(
            (f"{entry}\n[[workers]]\ncompute = 1\n{more}", "'5', which has no unit; expected one of")
            for entry, more in (
                ("latency = '5'", ""),
                ("latency = { kind = 'uniform', low = '5', high = '6 s' }", ""),
                ("bandwidth = '5'", ""),
                ("parameters = '5'", ""),
                ("apply = '5'", ""),
                ("update = '5'", ""),
                ("", "jitter = '5'"),
                ("", "fixed = '5'"),
                ("", "lost_at = '5'"),
                ("", "[[pauses]]\nworkers = [0]\nevery = '5'\nlasting = '1 s'"),
                ("", "[[uplinks]]\nworkers = [0]\nbandwidth = '5'"),
            )
        ),
        ("[[workers]]\ncompute = true", "compute is True"),
        ("[[workers]]\ncompute = 1\ncount = 0", r"workers\[0\].count is 0"),
        ("[[workers]]\ncompute = 1\njitter = '150 %'", "jitter is 150%"),
        (
            "[[workers]]\ncompute = 1\nfixed = '140 %'",
            r"workers\[0\].fixed is '140 %', expected at most 100 %",
        ),
        ("[[workers]]\ncompute = { kind = 'gauss' }", "gauss.*Kinds of times"),
        ("[[workers]]\ncompute = { kind = 'uniform', low = 2, high = 1 }", "low is 2 and high is 1"),
        ("[[workers]]\ncompute = { kind = 'uniform', low = 2 }", "missing required field `high`"),
        ("[[workers]]\ncompute = { kind = 'uniform', low = 1, hihg = 2 }", "unknown field `hihg`"),
        ("[[workers]]\ncompute = { low = 1, high = 2 }", "kind is None.*Kinds of times"),
        ("[[workers]]\ncompute = { kind = ['uniform'], low = 1 }", "kind is .'uniform'..*Kinds of times"),
        (
            "[[workers]]\ncompute = { kind = 'constant', seconds = [1, 2] }",
            "seconds is .1.0, 2.0., expected a number",
        ),
        ("[[workers]]\ncompute = { kind = 'recorded', seconds = 1 }", "seconds is 1.0, expected a list"),
        (
            "[[workers]]\ncompute = { kind = 'pareto', least = 1, alpha = 'a' }",
            "compute.alpha is 'a', expected a number",
        ),
        (
            "[[workers]]\ncompute = { kind = 'uniform', low = 1, high = 2 }\njitter = 0.1",
            "compute is not a single number",
        ),
        (
            "[[workers]]\ncompute = 1\nback_after = 3",
            "never lost. Also give lost_at or preempted_every",
        ),
        (
            "[[workers]]\ncompute = 1\nlost_at = 3\npreempted_every = 4",
            r"workers\[0\]: lost_at and preempted_every are both given",
        ),
        ("[[workers]]\ncompute = 1\njoins_at = 3\nlost_at = 1", r"workers\[0\]: lost_at is 1"),
        ("[[workers]]\ncompute = 1\npreempted_every = 0", r"workers\[0\]: preempted_every is 0"),
        (
            "[[workers]]\ncompute = 1\ncount = '3'",
            r"workers\[0\].count is text, expected a whole number",
        ),
        ("servers = 1.5\n[[workers]]\ncompute = 1", "servers is a number, expected a whole number"),
        ("workers = [3]", r"workers\[0\] is a whole number, expected a table"),
        ("[[workers]]\ncompute = 1\nlost_at = -3", "lost_at is -3"),
        ("servers = 0\n[[workers]]\ncompute = 1", "servers is 0"),
        ("bandwidth = 0\n[[workers]]\ncompute = 1", "bandwidth is 0"),
        ("[[workers]\ncompute = 1", "is not a TOML file"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        read(tmp_path, text)
    assert "cluster.toml" in str(caught.value)
    names_of_python = r"_s\b|_bps\b|_bytes\b|_share\b|Expected `|Object"
    assert not re.search(names_of_python, str(caught.value))


def test_a_file_that_is_not_there_is_named_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere.toml cannot be read.*fluent-ps-32"):
        Cluster.from_toml(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigurationError, match="unknown cluster 'fluent'"):
        Cluster.preset("fluent")
