"""Measured links that differ from what the cut rests on: a new cut where it pays, and only then."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from heterotrain_core.units import UnitSeconds
from heterotrain_operator.cluster_state.links import MeasuredLink, settled
from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.telemetry import Rates, Sustained, Telemetry
from heterotrain_operator.decide.plan.changes import DWELL_S
from support.fake_cluster import FakeCluster, pool
from unit.operator.decide.plan import test_pipelines as pipelines
from unit.operator.decide.plan.test_planned_shards import MIB, MIXED, a_cluster, plan_of, profile

PAIRS = [("a", "b"), ("a", "c"), ("b", "c")]
TALKATIVE = {
    name: replace(each, units=tuple(replace(unit, boundary_bytes=16 * MIB) for unit in each.units))
    for name, each in MIXED.items()
}
"""Outputs of a unit take half a second for each sample over slow links, and the training state of one 4 s."""
SLOW = dict.fromkeys(PAIRS, MeasuredLink(2.0**25, 0.0))
"""Over such links, two workers are faster than three."""


def trained(cluster: FakeCluster, links: dict[tuple[str, str], MeasuredLink], lasts_s: float) -> None:
    """Let the members in force train for some time, in which they have measured these links."""
    generation = plan_of(cluster).generation
    rates = Rates(sustained=Sustained(generation, 10.0, lasts_s))
    cluster.telemetry = Telemetry(profiles=TALKATIVE, links=links, rates=rates)


def test_links_that_are_slower_than_stated_start_a_new_cut() -> None:
    cluster = a_cluster({"mode": "Pipeline", "linkMbitPerSecond": 10_000}, TALKATIVE).start()
    first = plan_of(cluster)
    assert len(first.ranks) == 3
    trained(cluster, SLOW, DWELL_S)
    cluster.settle()
    second = plan_of(cluster)
    assert second.generation == first.generation + 1
    assert sorted(second.pool_of(rank) for rank in second.ranks) == ["a", "b"]
    assert second.spares == ("job-w2",)
    assert "links as measured since the last cut" in second.reason
    assert "makes up for a pause" in second.reason
    trained(cluster, SLOW, DWELL_S)
    cluster.settle()
    assert plan_of(cluster).generation == second.generation, "the new members are the best ones"


@pytest.mark.parametrize(
    ("links", "lasts_s"),
    [
        (SLOW, DWELL_S - 1),  # the layout has not stayed for long enough
        ({}, 10 * DWELL_S),
        (dict.fromkeys(PAIRS, MeasuredLink(1.25e9, 0.0)), 10 * DWELL_S),  # as stated
        (dict.fromkeys(PAIRS, MeasuredLink(0.9e9, 1e-4)), 10 * DWELL_S),  # other members would gain less than 3 %
    ],
)
def test_the_cut_stays_otherwise(links: dict[tuple[str, str], MeasuredLink], lasts_s: float) -> None:
    cluster = a_cluster({"mode": "Pipeline", "linkMbitPerSecond": 10_000}, TALKATIVE).start()
    first = plan_of(cluster)
    trained(cluster, links, lasts_s)
    cluster.settle()
    assert plan_of(cluster).version == first.version


def test_faster_links_bring_a_spare_back() -> None:
    cluster = a_cluster({"mode": "Pipeline", "linkMbitPerSecond": 270}, TALKATIVE).start()
    first = plan_of(cluster)
    assert len(first.ranks) == 2
    trained(cluster, dict.fromkeys(PAIRS, MeasuredLink(1.25e9, 0.0)), DWELL_S)
    cluster.settle()
    assert len(plan_of(cluster).ranks) == 3


def test_ranks_are_numbered_again_around_slow_links() -> None:
    """Every worker keeps the whole model: only the order changes, in which gradients go round."""
    alike = {name: profile(name, memory_units=12, slowness=1) for name in "abcd"}
    cluster = a_cluster({"mode": "Pipeline", "linkMbitPerSecond": 10_000}, alike).start()
    first = plan_of(cluster)
    rates = Rates(sustained=Sustained(first.generation, 10.0, DWELL_S))
    stated = dict.fromkeys(itertools.combinations("abcd", 2), MeasuredLink(1.25e9, 0.0))
    neighbours = [(first.ranks[i].worker[-1], first.ranks[i + 1].worker[-1]) for i in (0, 2)]
    slow = {tuple(sorted("abcd"[int(number)] for number in pair)): MeasuredLink(2.0**25, 0.0) for pair in neighbours}
    cluster.telemetry = Telemetry(profiles=alike, links=stated | slow, rates=rates)
    cluster.settle()
    second = plan_of(cluster)
    assert second.generation == first.generation + 1
    order = [rank.worker[-1] for rank in second.ranks]
    around = {frozenset(pair) for pair in itertools.pairwise([*order, order[0]])}
    assert len(order) == 4
    assert not around & {frozenset(pair) for pair in neighbours}
    trained = Rates(sustained=Sustained(second.generation, 10.0, DWELL_S))
    cluster.telemetry = replace(cluster.telemetry, rates=trained)
    cluster.settle()
    assert plan_of(cluster).version == second.version


def test_smaller_micro_batches_than_planned_are_not_taken_for_another_layout() -> None:
    """Memory ran out, so the members in force are slower than planned. A new generation would change nothing."""
    units = pipelines.profile("a", units_that_fit=4).units
    slow_start = tuple(UnitSeconds(micro_batch_samples=n, forward_s=0.1 + 0.01 * n, backward_s=0.1) for n in (1, 2, 4))
    profiles = {"a": PoolProfile(units=tuple(replace(u, seconds={"a": slow_start}) for u in units), memory_bytes=2**32)}
    four = pool("a", maxReplicas=4)
    cluster = pipelines.a_cluster(four, profiles=profiles, elasticPolicy={"minReplicas": 2}).start()
    first = plan_of(cluster)
    assert [member.micro_batch_samples > 1 for member in first.members] == [True] * 2
    telemetry = pipelines.measured(cluster, {0: 0.01, 1: 0.01})
    cluster.telemetry = replace(
        telemetry,
        gauges={each: replace(gauges, micro_batch_cap_samples=1) for each, gauges in telemetry.gauges.items()},
        links={("a", "a"): MeasuredLink(1.25e9, 0.0)},
        rates=Rates(sustained=Sustained(first.generation, 10.0, DWELL_S)),
    )
    cluster.settle()
    assert [member.micro_batch_samples for member in plan_of(cluster).members] == [1, 1]
    assert plan_of(cluster).generation == first.generation


def test_new_cuts_wait_while_a_worker_leaves() -> None:
    """Its end is planned for by itself, with the measured links."""
    cluster = a_cluster({"mode": "Pipeline", "linkMbitPerSecond": 10_000}, TALKATIVE).start()
    trained(cluster, SLOW, DWELL_S)
    cluster.pods["job-w2"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.settle()
    assert "job-w2 will leave" in plan_of(cluster).reason


def test_a_value_stays_while_newer_ones_are_near_it() -> None:
    """Noise on the edge between two rounded values would start a search each time."""
    known = MeasuredLink(1e9, 1e-3)
    assert settled(None, known) is known
    for near in (replace_of(known, 1.15, 1.0), replace_of(known, 1 / 1.15, 1.15), replace_of(known, 1.0, 1 / 1.15)):
        assert settled(known, near) is known
    for far in (replace_of(known, 1.25, 1.0), replace_of(known, 1.0, 1.25), replace_of(known, 1 / 1.25, 1.0)):
        assert settled(known, far) is far
    tiny = MeasuredLink(1e9, 1e-7)
    assert settled(tiny, MeasuredLink(1e9, 5e-6)) is tiny


def replace_of(link: MeasuredLink, bytes_ratio: float, latency_ratio: float) -> MeasuredLink:
    return MeasuredLink(link.bytes_per_s * bytes_ratio, link.latency_s * latency_ratio)
