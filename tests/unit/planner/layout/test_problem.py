"""Problems of the layout planner: what is refused, and with which sentence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from heterotrain_core.contract import plan
from heterotrain_core.contract.plan import LayoutKind
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem, invalid
from heterotrain_planner.layout.result import DeviceLayout, PlannedShard, PlannedStage


def a_unit(**changes: object) -> UnitProfile:
    seconds = {"a100": (UnitSeconds(micro_batch_samples=1, forward_s=0.01, backward_s=0.02),)}
    unit = UnitProfile(name="block", parameter_bytes=100, activation_bytes=10, boundary_bytes=1, seconds=seconds)
    return replace(unit, **changes)  # type: ignore[arg-type]  # a builder for tests


SOUND = Problem(
    units=(a_unit(), a_unit()),
    kinds=(DeviceKind(name="a100", count=2, memory_bytes=1000),),
    batch_samples=8,
    micro_batches=(1, 2),
)


def test_a_sound_problem_is_accepted() -> None:
    assert invalid(SOUND) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_samples": 0}, "batch_samples is 0"),
        ({"batch_samples": math.nan}, "batch_samples is nan"),
        ({"micro_batches": (1, 9)}, "a micro-batch is 9"),
        ({"micro_batches": (2, 2)}, "a micro-batch size is listed twice"),
        ({"micro_batches": ()}, "the number of micro-batch sizes is 0"),
        ({"units": ()}, "the number of units is 0"),
        ({"kinds": ()}, "the number of device kinds is 0"),
        ({"kinds": SOUND.kinds * 2}, "a device kind is listed twice: a100"),
        ({"kinds": SOUND.kinds * 33}, "the number of device kinds is 33"),
        ({"kinds": (replace(SOUND.kinds[0], count=0),)}, "there is no device of any kind"),
        ({"kinds": (replace(SOUND.kinds[0], count=-1),)}, "device kind a100 has -1 devices"),
        ({"kinds": (replace(SOUND.kinds[0], memory_bytes=-5),)}, "device kind a100 has -5 bytes of memory"),
        ({"kinds": (replace(SOUND.kinds[0], price_per_hour=math.nan),)}, "device kind a100 has nan as price_per_hour"),
        ({"kinds": (replace(SOUND.kinds[0], update_s_per_byte=-1.0),)}, "kind a100 has -1.0 as update_s_per_byte"),
        ({"kinds": (replace(SOUND.kinds[0], name="t4"),)}, "was not measured on t4"),
        ({"links": {("a100", "t4"): Link()}}, "which are not two of the device kinds"),
        ({"default_link": Link(bytes_per_s=0.0)}, "needs bytes_per_s above 0"),
        ({"default_link": Link(bytes_per_s=math.nan)}, "needs bytes_per_s above 0"),
        ({"default_link": Link(latency_s=-1.0)}, "latency_s between 0"),
        ({"state_ratio": 0.5}, "state_ratio is 0.5"),
        ({"least_members": 0}, "least_members is 0"),
        ({"most_stages": 0}, "most_stages is 0"),
        ({"units": (a_unit(parameter_bytes=-1),)}, "unit 0 (block) has a size"),
        ({"units": (a_unit(activation_bytes=math.nan),)}, "unit 0 (block) has a size"),
        ({"units": (a_unit(seconds={}),)}, "was not measured on a100"),
    ],
)
def test_the_first_mistake_is_named(changes: dict[str, object], sentence: str) -> None:
    answer = invalid(replace(SOUND, **changes))  # type: ignore[arg-type]  # wrong values on purpose
    assert answer is not None
    assert sentence in answer


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ([(2, 1.0, 1.0), (1, 1.0, 1.0)], "do not grow"),
        ([(0, 1.0, 1.0)], "do not grow"),
        ([(1, -1.0, 1.0)], "not between 0"),
        ([(1, math.nan, 1.0)], "not between 0"),
        ([(1, 0.0, 0.0)], "less than 1e-09 s"),
        ([(1, 1e-25, 5e-324)], "less than 1e-09 s"),
    ],
)
def test_measurements_have_to_make_sense(points: list[tuple[int, float, float]], sentence: str) -> None:
    seconds = tuple(UnitSeconds(micro_batch_samples=b, forward_s=f, backward_s=g) for b, f, g in points)
    answer = invalid(replace(SOUND, units=(a_unit(seconds={"a100": seconds}),)))
    assert answer is not None
    assert sentence in answer


def test_a_link_is_the_same_both_ways_and_between_devices_of_a_kind() -> None:
    fast, slow = Link(bytes_per_s=1e9), Link(bytes_per_s=1e6, latency_s=0.001)
    kinds = (SOUND.kinds[0], DeviceKind(name="t4", count=1, memory_bytes=1))
    problem = replace(SOUND, kinds=kinds, links={("a100", "t4"): slow, ("a100", "a100"): fast})
    assert problem.link("t4", "a100") == problem.link("a100", "t4") == slow
    assert problem.link("a100", "a100") == fast
    assert problem.link("t4", "t4") == Link()
    assert slow.seconds(1000) == pytest.approx(0.002)


def test_a_layout_lists_its_devices_and_cuts() -> None:
    seconds = {"forward_s": 1.0, "backward_s": 2.0, "input_s": 0.0, "gradient_s": 0.5}
    stage = PlannedStage(kind="t4", first_unit=0, last_unit=2, **seconds, memory_bytes=9)
    pipeline = DeviceLayout(
        kind=LayoutKind.PIPELINE, stages=(stage, replace(stage, kind="a100", first_unit=3, last_unit=5))
    )
    assert (pipeline.cuts, dict(pipeline.devices)) == ((3,), {"t4": 1, "a100": 1})
    shard = PlannedShard(kind="t4", state_ratio=0.5, share_samples=4, micro_batch_samples=2, memory_bytes=9)
    assert DeviceLayout(kind=LayoutKind.SHARDED, shards=(shard, shard)).devices == {"t4": 2}
    assert stage.busy_s == 3.5


def test_a_plan_names_kind_cuts_and_shards() -> None:
    seconds = {"forward_s": 1.0, "backward_s": 2.0, "input_s": 0.0, "gradient_s": 0.5}
    stage = PlannedStage(kind="t4", first_unit=0, last_unit=2, **seconds, memory_bytes=9)
    shard = PlannedShard(kind="t4", state_ratio=0.5, share_samples=4, micro_batch_samples=2, memory_bytes=9)
    pipeline = DeviceLayout(kind=LayoutKind.PIPELINE, stages=(stage, replace(stage, first_unit=3, last_unit=5)))
    most = replace(shard, state_ratio=0.75, share_samples=1)
    sharded = DeviceLayout(kind=LayoutKind.SHARDED, shards=(most, replace(shard, state_ratio=0.25)))
    alone = DeviceLayout(kind=LayoutKind.REPLICATED, stages=(stage,))
    assert pipeline.planned == plan.Layout(kind=LayoutKind.PIPELINE, cuts=(3,))
    planned = sharded.planned
    assert (planned.kind, planned.shards, planned.sample_weights) == (LayoutKind.SHARDED, 2, (1, 4))
    assert planned.state_weights[0] == 3 * planned.state_weights[1]
    assert alone.planned == plan.Layout()
