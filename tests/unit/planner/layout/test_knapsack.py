"""The knapsack of shares and room, and water-filling, against scipy's integer programme and bisection."""

from __future__ import annotations

import random

import numpy as np
import pytest
from heterotrain_planner.layout.knapsack import DeviceMenu, menu, most_room, room_bounds
from heterotrain_planner.layout.state_shares import state_ratios
from scipy.optimize import LinearConstraint, milp
from support.repeat import times
from unit.planner.layout.sharded_oracle import largest_ratio


def some_menus(seed: int) -> tuple[list[DeviceMenu], int]:
    rng = random.Random(seed)
    menus = [
        menu(rng.randint(1, 4), tuple((rng.randint(0, 20), rng.uniform(0, 30)) for _ in range(rng.randint(1, 8))))
        for _ in range(rng.randint(1, 4))
    ]
    most = sum(one.devices * one.entries[-1][0] for one in menus)
    return menus, rng.randint(0, most + 3)


def by_programme(menus: list[DeviceMenu], samples: int, *, whole: bool) -> float | None:
    """Return the most room by an integer programme, or by its relaxation."""
    devices = [one for one in menus for _ in range(one.devices)]
    entries = [(index, b, r) for index, one in enumerate(devices) for b, r in one.entries]
    one_each = np.array([[float(index == device) for index, _, _ in entries] for device in range(len(devices))])
    limits = [
        LinearConstraint(one_each, 1, 1),
        LinearConstraint(np.array([[float(b) for _, b, _ in entries]]), samples, np.inf),
    ]
    found = milp(
        np.array([-r for _, _, r in entries]),
        constraints=limits,
        integrality=np.full(len(entries), int(whole)),
        bounds=(0, 1),  # type: ignore[arg-type]  # scipy takes a pair
    )
    return -float(found.fun) if found.success else None


@pytest.mark.parametrize("seed", range(times(gate=15, every=600)))
def test_most_room_and_its_bounds(seed: int) -> None:
    menus, samples = some_menus(seed)
    best, relaxed = by_programme(menus, samples, whole=True), by_programme(menus, samples, whole=False)
    exact, bounds = most_room(menus, samples), room_bounds(menus, samples)
    if best is None:
        assert exact is None
        assert bounds.picks == ()
        return
    assert exact is not None
    assert relaxed is not None
    assert exact[0] == pytest.approx(best)
    assert bounds.at_most == pytest.approx(relaxed)
    assert bounds.at_least <= best + 1e-9
    for picks, room in ((exact[1], exact[0]), (bounds.picks, bounds.at_least)):
        taken = [one.entries[entry] for one, entries in zip(menus, picks, strict=True) for entry in entries]
        assert [len(entries) for entries in picks] == [one.devices for one in menus]
        assert sum(b for b, _ in taken) >= samples
        assert sum(r for _, r in taken) == pytest.approx(room)


def test_a_menu_keeps_what_nothing_beats() -> None:
    assert menu(2, ((4, 1.0), (2, 3.0), (3, 1.0), (1, 3.0), (4, 0.5))).entries == ((2, 3.0), (4, 1.0))


@pytest.mark.parametrize("seed", range(times(gate=10, every=300)))
def test_water_filling_leaves_the_smallest_largest_part(seed: int) -> None:
    rng = random.Random(seed)
    rooms = [rng.choice([0.0, rng.uniform(0, 10)]) for _ in range(rng.randint(1, 6))]
    state = rng.uniform(0.1, 12)
    found, least = state_ratios(rooms, state), largest_ratio(rooms, state)
    if least is None:
        assert found is None
        return
    assert found is not None
    assert sum(found) == pytest.approx(1)
    assert all(part * state <= room + 1e-9 for part, room in zip(found, rooms, strict=True))
    assert max(found) == pytest.approx(least)


def test_no_state_is_divided_evenly() -> None:
    assert state_ratios([1.0, 0.0], 0.0) == (0.5, 0.5)
