"""The integer programme and its relaxation against HiGHS, and against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from heterotrain_planner.layout.integer import choose
from heterotrain_planner.layout.simplex import maximise
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from support.repeat import times


def an_instance(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(seed)
    kinds, templates = int(rng.integers(1, 4)), int(rng.integers(1, 12))
    need = rng.integers(0, 4, (templates, kinds))
    need[need.sum(axis=1) == 0, 0] = 1
    value = rng.uniform(0, 5, templates).round(1) + need.sum(axis=1)
    return value, need, rng.integers(0, 9, kinds), int(rng.integers(0, 4))


@pytest.mark.parametrize("seed", range(times(gate=60, every=3000)))
def test_the_relaxation_agrees_with_highs(seed: int) -> None:
    value, need, devices, least = an_instance(seed)
    limits = np.vstack([need.T, -np.ones(len(value))])
    want = linprog(-value, A_ub=limits, b_ub=np.append(devices, -least), method="highs")
    found = maximise(value, need.T.astype(float), devices.astype(float), least=least)
    if found is None:
        assert want.status != 0
        return
    assert found.value == pytest.approx(-want.fun, abs=1e-6)
    assert (need[found.columns].T @ found.amounts <= devices + 1e-6).all()
    assert found.amounts.sum() >= least - 1e-6


@pytest.mark.parametrize("seed", range(times(gate=60, every=3000)))
def test_the_programme_agrees_with_highs(seed: int) -> None:
    value, need, devices, least = an_instance(seed)
    rows = [LinearConstraint(need.T, -np.inf, devices), LinearConstraint(np.ones((1, len(value))), least, np.inf)]
    want = milp(-value, constraints=rows, integrality=np.ones(len(value)), bounds=Bounds(0, np.inf))
    found = choose(value, need, devices, least=least, most_nodes=5000)
    assert found.value == pytest.approx(-want.fun if want.status == 0 else -1.0, abs=1e-6)
    amounts = np.array([found.amounts.get(key, 0) for key in range(len(value))])
    assert (amounts @ need <= devices).all()
    if found.value >= 0:
        assert amounts.sum() >= least
        assert amounts @ value == pytest.approx(found.value)


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_a_short_search_keeps_its_bound(seed: int) -> None:
    value, need, devices, least = an_instance(1000 + seed)
    exact = choose(value, need, devices, least=least, most_nodes=5000).value
    for nodes in (1, 2, 5):
        short = choose(value, need, devices, least=least, most_nodes=nodes)
        assert short.value <= exact + 1e-9 <= short.bound + 1e-6


@pytest.mark.parametrize("seed", range(times(gate=10, every=400)))
def test_a_wanted_value_is_reached_if_it_can_be(seed: int) -> None:
    value, need, devices, least = an_instance(2000 + seed)
    exact = choose(value, need, devices, least=least, most_nodes=5000).value
    assert choose(value, need, devices, least=least, wanted=exact, most_nodes=5000).value >= exact - 1e-9
    assert choose(value, need, devices, least=least, wanted=exact + 1, most_nodes=5000).value <= exact + 1e-9


def test_no_template_and_no_device() -> None:
    nothing = np.zeros((0, 1), dtype=np.int64)
    assert choose(np.zeros(0), nothing, np.array([3])).value == 0.0
    assert choose(np.zeros(0), nothing, np.array([3]), least=1).value == -1.0
    assert choose(np.ones(1), np.ones((1, 1), dtype=np.int64), np.array([0]), least=1).value == -1.0


def test_enumeration_agrees() -> None:
    """One small case without any solver."""
    value, need, devices = np.array([3.0, 4.0, 5.1]), np.array([[1, 0], [1, 1], [0, 2]]), np.array([3, 3])
    best = -math.inf
    for amounts in itertools.product(range(4), repeat=3):
        if (np.array(amounts) @ need <= devices).all() and sum(amounts) >= 2:
            best = max(best, float(np.array(amounts) @ value))
    assert choose(value, need, devices, least=2).value == pytest.approx(best)


def test_a_relaxation_that_rounding_leaves_below_the_goal_still_has_its_members() -> None:
    """The relaxation's value is 8 − 2e-15, and two members reach 8."""
    value = np.array([2.0, 3.0, 4.0, 4.0, 6.0, 6.0])
    need = np.array([[0, 1, 1, 1], [0, 2, 2, 1], [1, 1, 2, 1], [2, 0, 2, 1], [1, 2, 3, 1], [2, 1, 3, 1]])
    found = choose(value, need, np.array([2, 2, 8, 1024]), least=2, wanted=8.0)
    assert found.value == 8
    assert found.bound >= 8
