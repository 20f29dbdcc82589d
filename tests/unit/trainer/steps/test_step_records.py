"""What a committed step is worth telling people."""

from __future__ import annotations

from dataclasses import replace

import pytest
from heterotrain.steps.step_records import price_of
from heterotrain_core.contract.plan import Layout, LayoutKind
from support.plans import plan_of, replicas

PRICES = {"a100": 3.67, "t4": 0.30}


def test_each_worker_of_the_plan_counts_once_at_the_price_of_its_pool() -> None:
    members, ranks = replicas([8, 8, 4], pool="a100")
    workers = ("w0", "w0", "w2")
    ranks = tuple(replace(rank, worker=worker) for rank, worker in zip(ranks, workers, strict=True))
    plan = plan_of([8, 8, 4], members=members, ranks=ranks)
    assert price_of(plan, PRICES) == pytest.approx(2 * 3.67)


def test_stages_in_several_pools_have_prices_of_their_own() -> None:
    layout = Layout(kind=LayoutKind.PIPELINE, cuts=(2,))
    plan = plan_of([8], layouts=[layout])
    first, second = plan.ranks
    pools = (replace(first, pool="a100"), replace(second, pool="t4"))
    assert price_of(plan_of([8], layouts=[layout], ranks=pools), PRICES) == pytest.approx(3.97)


def test_a_pool_without_a_price_counts_nothing_and_without_any_there_is_none() -> None:
    assert price_of(plan_of([8]), PRICES) == 0.0
    assert price_of(plan_of([8]), {}) is None
