"""Other systems' distributions are special cases: a member is anything with a time curve, a cap and a floor.

Per-microbatch times of whole pipelines stand where a GPU's samples stand otherwise. Sources: Oobleck's instantiation
(SOSP'23 code: least variance; 2024 code: least maximum), Malleus' data assignment with a floor per pipeline, Whale's
load ratios under memory limits (ATC'22 §3.3.1), measured iterations of Sailor's mixed clusters (OPT-350M, validation
runs).
"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, replace

import pytest
from heterotrain_core.contract.plan import Binding, CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Split, balance, evaluate
from heterotrain_core.split.member import SplitMember, TableTime


def pipeline(seconds: float, *, floor: int = 0, cap: int | None = None) -> SplitMember:
    """Return a whole pipeline that needs this long per microbatch."""
    model = ComputeTime(per_sample_s=seconds, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)
    return SplitMember(compute=model, floor_samples=floor, cap_samples=cap)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published distribution: its system's choice or measurement, and the optimum."""

    name: str
    total: int
    members: tuple[SplitMember, ...]
    sync_s: float = 0.0
    best_step_s: float
    best_shares: tuple[int, ...] | None = None
    others_shares: tuple[int, ...] | None = None
    others_step_s: float | None = None


CASES = [
    Case(
        name="Oobleck, worst of 3,822 instances: least variance 14.80, least maximum 10.38",
        total=28,
        members=(*[pipeline(1.57)] * 3, pipeline(3.70), *[pipeline(3.46)] * 3),
        best_step_s=10.38,
        others_shares=(5, 5, 5, 4, 3, 3, 3),
        others_step_s=14.80,
    ),
    Case(
        name="Oobleck: a zero share is legal for a pipeline that is slower than all others together",
        total=4,
        members=(pipeline(1.0), pipeline(1.0), pipeline(9.0)),
        best_step_s=2.0,
        best_shares=(2, 2, 0),
    ),
    Case(
        name="Malleus: at least as many microbatches as stages, or the pipeline never fills",
        total=16,
        members=(pipeline(1.0, floor=2), pipeline(1.0, floor=2), pipeline(3.0, floor=4)),
        best_step_s=12.0,
        best_shares=(6, 6, 4),
    ),
    Case(
        name="Whale: load by capability until memory is full, the rest to who has room (V100 : P100 = 14 : 9.3)",
        total=1000,
        members=(pipeline(1 / 14, cap=400), pipeline(1 / 9.3), pipeline(1 / 9.3)),
        best_step_s=300 / 9.3,
        best_shares=(400, 300, 300),
    ),
    Case(
        name="Sailor N4_D4: measured 83.45 s a step at equal shares",
        total=128,
        members=(pipeline(1.896), pipeline(0.910), pipeline(0.776), pipeline(0.910)),
        sync_s=21.6,
        best_step_s=53.83,
        best_shares=(17, 35, 41, 35),
        others_shares=(32, 32, 32, 32),
        others_step_s=82.27,
    ),
    Case(
        name="Sailor N6_D6: measured 70.79 s a step at equal shares",
        total=144,
        members=(pipeline(1.896), *[pipeline(0.910)] * 3, *[pipeline(0.776)] * 2),
        sync_s=22.6,
        best_step_s=45.35,
        others_shares=(24,) * 6,
        others_step_s=68.10,
    ),
    Case(
        name="Sailor N2_D2: two pipelines of very different speed",
        total=128,
        members=(pipeline(1.159), pipeline(0.473)),
        sync_s=17.6,
        best_step_s=60.64,
        best_shares=(37, 91),
        others_shares=(64, 64),
        others_step_s=91.78,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_special_case(case: Case) -> None:
    """The shares reach the stated optimum, and the system's own choice costs as stated."""
    communication = CommunicationTime(last_bucket_s=case.sync_s)
    found = balance(case.total, case.members, communication=communication)
    assert isinstance(found, Split)
    assert found.step_s == pytest.approx(case.best_step_s, abs=0.006)
    if case.best_shares is not None:
        assert found.shares == case.best_shares
    if case.others_shares is not None:
        other = evaluate(case.others_shares, case.members, communication=communication)
        assert isinstance(other, Split)
        assert other.step_s == pytest.approx(case.others_step_s, abs=0.006)
        assert other.step_s > found.step_s


def test_measured_layers_with_caps() -> None:
    """Cephalo's llama-7b layers (ms at 1, 2, 4, 8, 16; the profiled range is the cap): exact where proportional breaks.

    Shares in proportion to single-sample speed would give the H100 more than its 16.
    """
    layers = {
        "h100": (3.6, 5.2, 9.1, 17.0, 32.9),
        "a6000": (13.4, 20.4, 33.8, 60.7, 115.5),
        "t4": (39.7, 60.8, 107.3, 231.8, 488.9),
    }
    some = [
        SplitMember(compute=TableTime(points=tuple(zip((1, 2, 4, 8, 16), ms, strict=True)))) for ms in layers.values()
    ]
    by_speed = [24 / ms[0] / sum(1 / x[0] for x in layers.values()) for ms in layers.values()]
    assert by_speed[0] > 16
    found = balance(24, some)
    assert isinstance(found, Split)
    assert found.shares == (16, 7, 1)
    assert found.bindings[0] is Binding.MEMORY
    assert found.step_s == pytest.approx(33.8 + 3 / 4 * (60.7 - 33.8))


def test_times_that_grow_by_less_than_a_float_resolves_are_shared() -> None:
    """A member that waits for the exchange alone takes as long with one sample as with all, but for the last digit."""
    grows = ComputeTime(per_sample_s=0.0025, fixed_s=0.0002, backward_per_sample_s=0.0021, backward_fixed_s=0.0002)
    for update_s in (0.4675, *(number / 977 for number in range(400))):
        flat = ComputeTime(
            per_sample_s=0.0, fixed_s=0.0, backward_per_sample_s=2e-10, backward_fixed_s=1e-10, update_s=update_s
        )
        members = [SplitMember(compute=compute, floor_samples=1, cap_samples=8) for compute in (grows, flat)]
        found = balance(13, members, communication=CommunicationTime(overlapped_s=0.1, last_bucket_s=0.1))
        assert isinstance(found, Split)
        assert sum(found.shares) == 13


@pytest.mark.parametrize("per_sample_s", [0.0, 5e-324, 1e-25, 1e-17])
def test_samples_that_take_less_than_the_last_digit_of_a_step_cost_neither_time_nor_memory(per_sample_s: float) -> None:
    """Fits of steps that do not grow with the share say this, too. The third member takes what it ends within 1 s."""
    tiny, slow = pipeline(per_sample_s), pipeline(0.001)
    tiny, slow = (
        replace(member, compute=replace(compute, fixed_s=fixed_s))
        for member, compute, fixed_s in ((tiny, tiny.compute, 1.0), (slow, slow.compute, 0.5))
        if isinstance(compute, ComputeTime)
    )
    tracemalloc.start()
    try:
        found = balance(10**7, (tiny, tiny, slow))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found, Split)
    assert sum(found.shares) == 10**7
    assert found.step_s == pytest.approx(1.0, rel=1e-9)
    assert found.shares[2] <= 500
    assert abs(found.shares[0] - found.shares[1]) <= 1
    assert peak_bytes < 10**6
