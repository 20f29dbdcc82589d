"""The planner's links: measured ones take the place of stated ones."""

from __future__ import annotations

import math
import random

import pytest
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.links import LEAST_LATENCY_S, MeasuredLink
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.layout_problem import links_of, problem_of
from heterotrain_planner.layout.problem import Problem
from unit.operator.decide.plan.test_planned_shards import MIXED, a_cluster, plan_of

MODE = {
    "mode": "Pipeline",
    "linkMbitPerSecond": 10_000,
    "links": [{"between": ["b", "a"], "mbitPerSecond": 1000}],
}


def spec_of() -> HeteroTrainJobSpec:
    return HeteroTrainJobSpec.model_validate(a_cluster(MODE).job["spec"])


def test_measured_links_take_the_place_of_stated_ones() -> None:
    spec = spec_of()
    default, stated = links_of(spec, MIXED, {})
    assert default.bytes_per_s == 1.25e9
    assert {pair: link.bytes_per_s for pair, link in stated.items()} == {("a", "b"): 1.25e8}
    measured = {("a", "b"): MeasuredLink(2.0**25, 2.0**-10), ("c", "c"): MeasuredLink(2.0**30, 0.0)}
    default, found = links_of(spec, MIXED, {**measured, ("a", "elsewhere"): MeasuredLink(1e3, 1.0)})
    assert default.bytes_per_s == 1.25e9
    assert {pair: (link.bytes_per_s, link.latency_s) for pair, link in found.items()} == {
        ("a", "b"): (2.0**25, 2.0**-10),
        ("c", "c"): (2.0**30, 0.0),
    }
    problem = problem_of(spec, MIXED, dict.fromkeys(MIXED, 1), measured)
    assert isinstance(problem, Problem)
    assert problem.link("b", "a").bytes_per_s == 2.0**25
    assert problem.link("a", "c").bytes_per_s == 1.25e9


def test_small_changes_ask_the_planner_nothing_new() -> None:
    """Values are rounded by at most 9 %, and those near each other are equal."""
    rng, spec = random.Random(3), spec_of()  # noqa: S311  # reproducible
    for _ in range(200):
        value, latency_s = 10 ** rng.uniform(3, 13), 10 ** rng.uniform(-8, 1.7)
        link = links_of(spec, MIXED, {("a", "b"): MeasuredLink(value, latency_s)})[1]["a", "b"]
        assert abs(math.log(link.bytes_per_s / value)) < math.log(1.095)
        if latency_s < LEAST_LATENCY_S:
            assert link.latency_s == 0
        else:
            assert abs(math.log(link.latency_s / latency_s)) < math.log(1.095)
    one, other = (
        links_of(spec, MIXED, {("a", "b"): MeasuredLink(1e9 * change, 0.0)})[1]["a", "b"] for change in (0.99, 1.01)
    )
    assert one == other


def test_a_slow_link_that_was_measured_changes_the_members() -> None:
    """By the stated bandwidth, all devices form one member; over the measured one, it would be slower than a alone."""

    def shards(links: dict[tuple[str, str], MeasuredLink]) -> int:
        cluster = a_cluster({"mode": "Auto", "linkMbitPerSecond": 10_000})
        cluster.telemetry = Telemetry(profiles=MIXED, links=links)
        return len(plan_of(cluster.start()).ranks)

    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    assert shards({}) == 3
    assert shards({pair: MeasuredLink(1e4, 0.0) for pair in pairs}) < 3


@pytest.mark.parametrize("value", [1e3, 1e13])
def test_the_limits_of_what_is_accepted_make_a_sound_problem(value: float) -> None:
    measured = {("a", "b"): MeasuredLink(value, 60.0)}
    assert isinstance(problem_of(spec_of(), MIXED, dict.fromkeys(MIXED, 1), measured), Problem)
