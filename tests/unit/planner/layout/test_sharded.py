"""Sharded members: shares by speed and state by memory, against every division, a linear programme and the memory."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from heterotrain_core.contract.plan import LayoutKind
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.cover import cover
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from heterotrain_planner.layout.result import Cover, Template
from heterotrain_planner.layout.sharded import GAP_RATIO, sharded_template, sharded_templates
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from scipy.optimize import linprog
from support.repeat import times
from unit.planner.layout.sharded_oracle import a_problem, least_pass_s, whole_units_bytes

MIB, GIB = 2**20, 2**30
KINDS = {"a100": (1.0, 1.0, 80), "a6000": (2.4, 1.5, 48), "a10g": (4.0, 0.5, 22), "t4": (9.0, 1.0, 15)}
"""Milliseconds a sample, fixed milliseconds, GiB."""


def a_cluster(count: int = 16, *, state_part: float = 0.5, bytes_per_s: float = math.inf, units: int = 12) -> Problem:
    """Return a model whose training state takes a part of the memory of four kinds of devices."""
    profiles = tuple(
        UnitProfile(
            name=f"block{index}",
            parameter_bytes=50 * MIB,
            activation_bytes=64 * MIB,
            boundary_bytes=MIB,
            seconds={
                name: tuple(
                    UnitSeconds(micro_batch_samples=m, forward_s=(s + a * m) / 3e3, backward_s=(s + a * m) / 1.5e3)
                    for m in (1, 4, 64)
                )
                for name, (a, s, _) in KINDS.items()
            },
        )
        for index in range(units)
    )
    kinds = tuple(
        DeviceKind(name=name, count=count, memory_bytes=memory * GIB) for name, (_, _, memory) in KINDS.items()
    )
    memory = sum(kind.count * kind.memory_bytes for kind in kinds)
    return Problem(
        units=profiles,
        kinds=kinds,
        default_link=Link(bytes_per_s=bytes_per_s),
        state_ratio=state_part * memory / (units * 50 * MIB),
        batch_samples=4096,
        micro_batches=(1,),
    )


def solved(problem: Problem, samples: int, *, equal_shards: bool = False) -> Template:
    found = sharded_template(problem, [kind.count for kind in problem.kinds], samples, equal_shards=equal_shards)
    assert found is not None
    return found


def by_kind(problem: Problem, devices: dict[str, int]) -> list[int]:
    return [devices.get(kind.name, 0) for kind in problem.kinds]


def assert_possible(problem: Problem, found: Template, samples: int) -> None:
    """Check the parts of every device, and that each has room for its shard and one sample.

    A device without samples runs one of weight zero in each pass, because all devices meet in the collectives.
    """
    memory = {kind.name: kind.memory_bytes for kind in problem.kinds}
    activation_bytes = sum(unit.activation_bytes for unit in problem.units)
    gathered_bytes = whole_units_bytes(problem, len(found.layout.shards))
    state_bytes = problem.state_ratio * sum(unit.parameter_bytes for unit in problem.units)
    assert sum(shard.share_samples for shard in found.layout.shards) == samples == found.micro_batch_samples
    assert sum(shard.state_ratio for shard in found.layout.shards) == pytest.approx(1)
    for shard in found.layout.shards:
        assert 0 <= shard.share_samples <= shard.micro_batch_samples
        held = shard.state_ratio * state_bytes + max(1, shard.micro_batch_samples) * activation_bytes + gathered_bytes
        assert shard.memory_bytes == pytest.approx(held, abs=1)
        assert held <= memory[shard.kind] * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(times(gate=18, every=720)))
def test_no_division_is_faster(seed: int) -> None:
    problem, devices, samples = a_problem(seed)
    equal_shards = bool(seed & 1)
    found = sharded_template(problem, by_kind(problem, devices), samples, equal_shards=equal_shards)
    least = least_pass_s(problem, devices, samples, equal_shards=equal_shards)
    if least is None or found is None:
        assert least is found is None
        return
    assert least * (1 - 1e-9) <= found.first_s <= least * (1 + 1.01 * GAP_RATIO)
    assert_possible(problem, found, samples)


def test_every_device_has_room_for_its_shard_and_one_sample() -> None:
    idle = 0
    for seed in range(times(gate=150, every=20_000)):
        problem, devices, samples = a_problem(seed, most_devices=4)
        member = sharded_template(problem, by_kind(problem, devices), samples, equal_shards=False)
        if member is not None:
            assert_possible(problem, member, samples)
            idle += any(not shard.share_samples for shard in member.layout.shards)
    assert idle > 20


def test_a_sample_that_takes_a_part_of_the_room_below_the_cap_is_cheaper() -> None:
    # The state has 20 bytes. Beside two samples, a large device keeps 15 of them, and a small one 5 beside one sample.
    seconds = {
        "large": (UnitSeconds(micro_batch_samples=1, forward_s=1.0, backward_s=1.0),),
        "small": (UnitSeconds(micro_batch_samples=1, forward_s=2.0, backward_s=2.0),),
    }
    unit = UnitProfile(name="block", parameter_bytes=5, activation_bytes=10, boundary_bytes=1, seconds=seconds)
    problem = Problem(
        units=(unit,),
        kinds=(
            DeviceKind(name="large", count=1, memory_bytes=45),
            DeviceKind(name="small", count=1, memory_bytes=25),
        ),
        batch_samples=3,
        micro_batches=(1,),
    )
    found = solved(problem, 3)
    assert found.first_s == 4.0 == least_pass_s(problem, {"large": 1, "small": 1}, 3, equal_shards=False)
    assert [shard.share_samples for shard in found.layout.shards] == [2, 1]
    assert [shard.state_ratio for shard in found.layout.shards] == [0.75, 0.25]


def test_the_linear_relaxation_is_no_better_than_one_sample() -> None:
    # Times are lines and links take no time, so a linear programme bounds a pass: T ≥ fixed + rate · m, Σ m = samples,
    # and the state fits beside the activations.
    problem = a_cluster(count=4, state_part=0.6)
    found = solved(problem, 256)
    units, extra = 12, 4 * 50 * MIB
    activation, state = units * 64 * MIB, problem.state_ratio * units * 50 * MIB
    rows, limits = [], []
    for index, (rate, fixed, memory) in enumerate(KINDS.values()):
        row = np.zeros(5)
        row[index], row[4] = units * rate / 1e3, -1
        rows.append(row)
        limits.append(-units * fixed / 1e3)
        row = np.zeros(5)
        row[index] = activation
        rows.append(row)
        limits.append(memory * GIB - extra)
    room = sum(4 * (memory * GIB - extra) for _, _, memory in KINDS.values())
    rows.append(np.array([4 * activation] * 4 + [0]))
    limits.append(room - state)
    relaxed = linprog(
        np.array([0, 0, 0, 0, 1]),
        A_ub=np.array(rows),
        b_ub=np.array(limits),
        A_eq=np.array([[4, 4, 4, 4, 0]]),
        b_eq=[256],
        bounds=[(1, None)] * 4 + [(0, None)],
    )
    slowest_sample_s = units * max(rate for rate, _, _ in KINDS.values()) / 1e3
    assert relaxed.fun is not None
    assert relaxed.fun * (1 - 1e-9) <= found.first_s <= relaxed.fun + slowest_sample_s


def test_equal_shards_waste_large_memories() -> None:
    problem = a_cluster(state_part=0.2)
    equal, by_memory = solved(problem, 1024, equal_shards=True), solved(problem, 1024)
    assert {shard.state_ratio for shard in equal.layout.shards} == {1 / 64}
    assert by_memory.first_s <= equal.first_s
    # With a third of all memory as state, a fair part no longer fits on a T4, and state by memory still trains.
    tight = a_cluster(state_part=0.4)
    assert sharded_template(tight, [kind.count for kind in tight.kinds], 1024) is None
    assert_possible(tight, solved(tight, 1024), 1024)


def test_slow_links_keep_shards_more_equal_than_fast_ones() -> None:
    slow, fast = (a_cluster(state_part=0.5, bytes_per_s=speed) for speed in (1e9, 2e10))
    largest = [max(s.state_ratio for s in solved(problem, 1024).layout.shards) for problem in (slow, fast)]
    assert largest[0] < largest[1]


def test_one_device_is_as_fast_as_without_shards() -> None:
    problem = a_cluster(count=1, state_part=0.01, bytes_per_s=1.0)
    found = sharded_template(problem, [1, 0, 0, 0], 8)
    assert found is not None
    assert found.first_s == pytest.approx(12 * (1 + 8) / 1e3)
    assert found.layout.shards[0].state_ratio == 1


def test_a_template_takes_its_shares_in_passes() -> None:
    problem = a_cluster(count=4, bytes_per_s=1e10)
    found = solved(problem, 64)
    assert found.devices == (4, 4, 4, 4)
    assert found.first_s == found.next_s


def test_members_of_eight_four_and_one_device_train_side_by_side() -> None:
    unit = UnitProfile(
        name="block",
        parameter_bytes=22 * GIB // 10,
        activation_bytes=GIB // 8,
        boundary_bytes=MIB,
        seconds={
            name: (UnitSeconds(micro_batch_samples=1, forward_s=speed, backward_s=2 * speed),)
            for name, speed in (("small", 0.01), ("middle", 0.02), ("large", 0.005))
        },
    )
    problem = Problem(
        units=(unit,) * 10,
        kinds=(
            DeviceKind(name="small", count=8, memory_bytes=24 * GIB, devices_per_node=8),
            DeviceKind(name="middle", count=4, memory_bytes=36 * GIB, devices_per_node=4),
            DeviceKind(name="large", count=1, memory_bytes=94 * GIB),
        ),
        default_link=Link(bytes_per_s=10e9),
        links={("small", "small"): Link(bytes_per_s=250e9), ("middle", "middle"): Link(bytes_per_s=70e9)},
        batch_samples=512,
        micro_batches=(1, 2, 4, 8, 16),
        least_members=3,
    )
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable), templates
    kinds = frozenset({LayoutKind.SHARDED, LayoutKind.REPLICATED})
    found = cover(templates, kinds=kinds, further=sharded_templates(problem))
    assert isinstance(found, Cover), found
    assert [dict(layout.devices) for layout in found.layouts] in list(
        map(list, itertools.permutations([{"small": 8}, {"middle": 4}, {"large": 1}]))
    )
    assert sum(member.share_samples for member in found.members) == 512
    # Shares follow speed: eight devices at half the speed of the large one, four at a quarter of it.
    share = {member.pool: member.share_samples for member in found.members}
    assert share["small"] > 3 * share["middle"] > share["large"]


def test_more_samples_than_a_table_has_make_no_member() -> None:
    assert sharded_template(a_cluster(state_part=0.01), [1, 0, 0, 0], 10**9) is None
