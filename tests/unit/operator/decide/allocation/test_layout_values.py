"""Nodes for jobs whose members are planned: they are worth what the best layouts on them are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.allocation.layout_values import LayoutValues
from support.fake_cluster import FakeCluster, pool
from support.multi_job_cluster import MultiJobCluster
from unit.operator.decide.plan.test_pipelines import profile


def a_pipeline(multi: MultiJobCluster, name: str, units_that_fit: dict[str, float], **spec: Any) -> FakeCluster:
    """Add a job of six units whose workers, of up to four in each pool, hold so many of them."""
    prices = spec.pop("prices", {})
    pools = [pool(each, maxReplicas=4, **({"pricePerHour": prices[each]} if prices else {})) for each in units_that_fit]
    given = {"parallelism": {"mode": "Pipeline"}, "elasticPolicy": {"minReplicas": 1}, **spec}
    job = multi.add(name, *pools, **given)
    job.telemetry = Telemetry(
        profiles={each: profile(each, units_that_fit=fits, slowness=2) for each, fits in units_that_fit.items()}
    )
    return job


def test_a_job_is_not_left_with_workers_that_hold_no_model() -> None:
    """Three workers hold its model, and two are worth nothing. By speed alone, two jobs would get two workers each."""
    multi = MultiJobCluster().with_nodes("a", cpu="4")
    a_pipeline(multi, "large", {"a": 2.5})
    multi.add("small", pool("a", maxReplicas=4), elasticPolicy={"minReplicas": 1})
    multi.settle()
    assert multi.placed() == {"large": {"a": 3}, "small": {"a": 1}}
    assert len(multi.jobs["large"].members()) == 3


def test_a_job_that_no_nodes_of_the_cluster_can_hold_keeps_workers_that_say_so() -> None:
    multi = MultiJobCluster().with_nodes("a", cpu="4")
    large = a_pipeline(multi, "large", {"a": 1.2})
    multi.add("small", pool("a", maxReplicas=4), elasticPolicy={"minReplicas": 1})
    multi.settle()
    assert multi.placed()["large"]["a"] > 0
    assert "Add " in large.message("LayoutPlanned")


def test_the_cheapest_samples_are_those_of_the_cheapest_layout() -> None:
    """A sample is cheapest on b, but workers of b alone hold no model. So some of a are taken, with the best of b."""
    multi = MultiJobCluster().with_nodes("a", cpu="3").with_nodes("b", cpu="2")
    a_pipeline(multi, "frugal", {"a": 5.1, "b": 1.7}, objective="Cost", prices={"a": "10", "b": "1"})
    table = LayoutValues().of(multi.competitions()[0].competitors[0])
    assert table is not None
    counts = np.array([[a, b] for a in range(4) for b in range(3)][1:])
    cheapness = table.of(["a", "b"], counts) / (counts @ [10.0, 1.0])
    a, b = counts[int(np.argmax(cheapness))].tolist()
    multi.settle()
    assert multi.placed() == {"frugal": {"a": a, "b": b}}
    assert 0 < a < 3
    other = MultiJobCluster().with_nodes("a", "b", cpu="2")
    a_pipeline(other, "frugal", {"a": 5, "b": 3.5}, objective="Cost", prices={"a": "10", "b": "1"})
    other.settle()
    assert other.placed() == {"frugal": {"b": 2}}


def test_a_pool_without_a_profile_is_taken_to_be_like_another_one() -> None:
    """Else no worker would ever be there to measure."""
    multi = MultiJobCluster().with_nodes("a", "b", cpu="2")
    job = a_pipeline(multi, "job", {"a": 3.5, "b": 3.5})
    job.telemetry = replace(job.telemetry, profiles={"a": job.telemetry.profiles["a"]})
    (competition,) = multi.competitions()
    values = LayoutValues()
    table = values.of(competition.competitors[0])
    assert table is not None
    with_a, with_b, both, one = table.of(["a", "b"], np.array([[2, 0], [0, 2], [1, 1], [1, 0]])).tolist()
    assert with_a == with_b == both > 0
    assert one == 0
    assert values.of(competition.competitors[0]) is table, "it is made once"
    values.forget_unused()
    values.forget_unused()
    assert len(values) == 0


def test_other_jobs_have_no_table() -> None:
    multi = MultiJobCluster().with_nodes("a")
    multi.add("data", pool("a"))
    a_pipeline(multi, "unmeasured", {"a": 3}).telemetry = Telemetry()
    values = LayoutValues()
    competitors = [each for competition in multi.competitions() for each in competition.competitors]
    assert [values.of(each) for each in competitors] == [None, None]


def test_a_limited_job_names_the_workers_that_its_next_member_lacks() -> None:
    """Three workers of a, or two of a with one of b, hold the model. The other job has the rest of the nodes."""
    multi = MultiJobCluster().with_nodes("a", cpu="4").with_nodes("b", cpu="1")
    a_pipeline(multi, "large", {"a": 2.5, "b": 2.5})
    multi.add("small", pool("a", maxReplicas=4), pool("b", maxReplicas=4), elasticPolicy={"minReplicas": 1})
    multi.settle()
    large, small = multi.jobs["large"], multi.jobs["small"]
    placed = multi.placed()["large"]
    assert sum(placed.values()) == 3
    assert large.condition("WorkersLimited") == ("True", "NodesShared")
    assert "; the next member lacks 2 workers of a and a worker of b, or a worker of a and 2 workers of b, or " in (
        large.message("WorkersLimited")
    )
    assert "; the next member lacks a worker of a or b" in small.message("WorkersLimited")


def test_the_kind_that_is_lacking_is_the_one_that_can_hold_the_rest() -> None:
    """No device of b holds a unit, and two of a hold the model: so the next member lacks workers of a, not of b."""
    multi = MultiJobCluster().with_nodes("a", cpu="3").with_nodes("b", cpu="2")
    a_pipeline(multi, "large", {"a": 3.5, "b": 0.5})
    multi.add("small", pool("a", maxReplicas=3), pool("b", maxReplicas=2), elasticPolicy={"minReplicas": 1})
    multi.settle()
    assert multi.placed()["large"].get("a") == 2
    assert "; the next member lacks 2 workers of a" in multi.jobs["large"].message("WorkersLimited")


def test_a_job_that_waits_names_the_workers_of_its_first_member() -> None:
    """An older job trains on all nodes that could hold the model, and is never stopped."""
    multi = MultiJobCluster().with_nodes("a", cpu="2")
    multi.add("old", pool("a", maxReplicas=2), elasticPolicy={"minReplicas": 2})
    multi.settle()
    large = a_pipeline(multi, "large", {"a": 3.5})
    multi.settle()
    assert large.condition("WorkersLimited") == ("True", "WaitingForNodes")
    assert "; the next member lacks 2 workers of a" in large.message("WorkersLimited")


def test_no_member_lacks_workers_that_the_job_may_not_have() -> None:
    multi = MultiJobCluster().with_nodes("a", cpu="4")
    large = a_pipeline(multi, "large", {"a": 2.5})
    large.edit(lambda spec: spec["workerPools"][0].update(maxReplicas=5))
    multi.add("small", pool("a", maxReplicas=4), elasticPolicy={"minReplicas": 1})
    multi.settle()
    assert "lacks" not in large.message("WorkersLimited"), "five workers form one member, and it has one"
