"""Grouping over slow networks: against every arrangement of single devices, and on published wide-area links."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from heterotrain_planner.layout.problem import Link
from heterotrain_planner.layout.result import NoLayout
from heterotrain_simulator import grouping
from heterotrain_simulator.grouping import Grouping, Zone, group
from heterotrain_simulator.grouping_bound import least_total
from heterotrain_simulator.zones import zone_costs
from support.repeat import times

Links = Mapping[tuple[str, str], Link]


def a_problem(seed: int) -> tuple[list[Zone], Links, int, float, float]:
    rng = random.Random(seed)
    stages, members = rng.choice([(1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (4, 1), (4, 2)])
    devices = stages * members
    number = rng.randint(1, min(4, devices))
    cuts = sorted(rng.sample(range(1, devices), number - 1))
    sizes = [end - start for start, end in itertools.pairwise([0, *cuts, devices])]
    zones = [Zone(name=f"z{index}", devices=size) for index, size in enumerate(sizes)]
    links = {
        (one.name, other.name): Link(
            bytes_per_s=10 * (1 if one is other else rng.uniform(0.05, 1.2)), latency_s=rng.uniform(0, 0.5)
        )
        for one, other in itertools.combinations_with_replacement(zones, 2)
    }
    return zones, links, stages, rng.uniform(1, 100), rng.uniform(1, 100)


def least_total_s(zones: Sequence[Zone], links: Links, stages: int, exchange: float, boundary: float) -> float:
    """Return the least sum over all arrangements of single devices."""
    homes = [zone.name for zone in zones for _ in range(zone.devices)]
    members = len(homes) // stages

    def seconds(one: int, other: int, size: float) -> float:
        pair = (homes[one], homes[other])
        return links[pair if pair in links else pair[::-1]].seconds(size)

    def arrangements(rest: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
        if not rest:
            return [[]]
        found = []
        for stage in itertools.combinations(rest, members):
            left = tuple(device for device in rest if device not in stage)
            found += [[stage, *others] for others in arrangements(left)]
        return found

    def edge(one: tuple[int, ...], other: tuple[int, ...]) -> float:
        return min(
            max(2 * seconds(a, b, boundary) for a, b in zip(one, order, strict=True))
            for order in itertools.permutations(other)
        )

    known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    best = math.inf
    for stages_of in arrangements(tuple(range(len(homes)))):
        total = max(
            sum(2 * seconds(device, other, exchange / members) for other in stage if other != device)
            for stage in stages_of
            for device in stage
        )
        for pair in itertools.pairwise(stages_of):
            if pair not in known:
                known[pair] = edge(*pair)
            total += known[pair]
        best = min(best, total)
    return best


def solved(zones: Sequence[Zone], links: Links, stages: int, exchange: float, boundary: float) -> Grouping:
    found = group(zones, links, stages=stages, exchange_bytes=exchange, boundary_bytes=boundary)
    assert isinstance(found, Grouping), found
    assert sum(map(Counter, found.stages), Counter()) == {zone.name: zone.devices for zone in zones}
    for place, stage in enumerate(found.stages):
        assert Counter(path[place] for path in found.members) == stage
    slowest = 0.0
    for before, after in itertools.pairwise(range(stages)):
        pairs = [(path[before], path[after]) for path in found.members]
        slowest += 2 * max(links[pair if pair in links else pair[::-1]].seconds(boundary) for pair in pairs)
    assert slowest == pytest.approx(found.pipeline_s)
    return found


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_small_problems_are_solved_exactly(seed: int) -> None:
    found = solved(*a_problem(seed))
    assert found.exact
    assert found.bound_s == pytest.approx(found.exchange_s + found.pipeline_s)
    assert found.bound_s == pytest.approx(least_total_s(*a_problem(seed)))


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_the_search_for_large_problems_is_near_and_its_bound_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "EXACT_WORK", -1)
    zones, links, stages, exchange, boundary = a_problem(seed)
    found, least = solved(zones, links, stages, exchange, boundary), least_total_s(*a_problem(seed))
    assert not found.exact or stages == 1
    # The bound must not lean on what the search has found.
    members = sum(zone.devices for zone in zones) // stages
    costs = zone_costs(
        [zone.name for zone in zones], links, stage_devices=members, exchange_bytes=exchange, boundary_bytes=boundary
    )
    assert least_total(costs, stages, math.inf) <= least * (1 + 1e-9)
    assert found.bound_s <= least * (1 + 1e-9)
    assert least * (1 - 1e-9) <= found.exchange_s + found.pipeline_s <= 1.05 * least


def two_campuses(boundary_gbit: float) -> Links:
    near, far = Link(bytes_per_s=5e9 / 8, latency_s=0.001), Link(bytes_per_s=boundary_gbit * 1e9 / 8, latency_s=0.011)
    return {("ohio", "ohio"): near, ("virginia", "virginia"): near, ("ohio", "virginia"): far}


def test_large_gradients_stay_in_a_zone_and_large_activations_in_a_member() -> None:
    zones = [Zone(name="ohio", devices=32), Zone(name="virginia", devices=32)]
    stages = solved(zones, two_campuses(1.12), 8, 5e9, 1e7).stages
    assert [dict(stage) for stage in stages] in (
        [{"ohio": 8}] * 4 + [{"virginia": 8}] * 4,
        [{"virginia": 8}] * 4 + [{"ohio": 8}] * 4,
    )
    members = solved(zones, two_campuses(1.12), 8, 1e6, 5e9).members
    assert all(len(set(path)) == 1 for path in members)


def test_more_zones_than_sets_are_searched_have_a_bound() -> None:
    zones = [Zone(name=f"z{index}", devices=2) for index in range(10)]
    rng = random.Random(1)
    links = {
        (one.name, other.name): Link(bytes_per_s=10.0 if one is other else rng.uniform(1, 5))
        for one, other in itertools.combinations_with_replacement(zones, 2)
    }
    found = solved(zones, links, 5, 10.0, 10.0)
    assert not found.exact
    assert 0 < found.bound_s <= found.exchange_s + found.pipeline_s
    assert "above the least" in found.reason


@pytest.mark.parametrize(
    ("zones", "stages", "sentence"),
    [
        ([Zone(name="ohio", devices=5)], 2, "leave 1 out"),
        ([Zone(name="ohio", devices=2)] * 2, 2, "different names"),
        ([Zone(name="ohio", devices=0)], 1, "a zone without devices"),
        ([Zone(name="ohio", devices=2), Zone(name="oslo", devices=2)], 2, "the link between ohio and oslo is missing"),
    ],
)
def test_what_cannot_be_grouped_is_refused_with_a_sentence(zones: list[Zone], stages: int, sentence: str) -> None:
    found = group(zones, two_campuses(1.12), stages=stages, exchange_bytes=1.0, boundary_bytes=1.0)
    assert isinstance(found, NoLayout)
    assert sentence in found.reason


def test_a_broken_link_is_refused() -> None:
    links = {("ohio", "ohio"): Link(bytes_per_s=0.0)}
    found = group([Zone(name="ohio", devices=2)], links, stages=2, exchange_bytes=1.0, boundary_bytes=1.0)
    assert isinstance(found, NoLayout)
    assert "bytes_per_s above 0" in found.reason
