"""Simulated schedules against the longest path through all passes, found by repeated relaxation."""

from __future__ import annotations

import itertools
import random

import pytest
from heterotrain.parts.stages.schedule_1f1b import Pass, passes
from heterotrain_planner.layout.schedule import MOST_SIMULATED, Passes, share_seconds, timeline
from support.repeat import times


def by_relaxation(stages: list[Passes], micro_batches: int) -> float:
    """Return the end of the last pass: raise all end times until every dependency holds.

    The order of a stage's passes is the trainer's own.
    """
    size = len(stages)
    end: dict[tuple[str, int, int], float] = {}
    before: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {}
    for stage in range(size):
        own = passes(stage=stage, stages=size, micro_batches=micro_batches)
        order = [("F" if which is Pass.FORWARD else "B", stage, index) for which, index in own]
        for previous, current in itertools.pairwise([None, *order]):
            needs = [previous] if previous else []
            what, _, index = current  # type: ignore[misc]  # only the first is None
            source = stage - 1 if what == "F" else stage + 1
            if 0 <= source < size:
                needs.append((what, source, index))
            if what == "B" and stage == size - 1:
                needs.append(("F", stage, index))
            before[current] = needs  # type: ignore[index]  # as above
            end[current] = 0.0  # type: ignore[index]  # as above
    changed = True
    while changed:
        changed = False
        for key, needs in before.items():
            seconds = stages[key[1]].forward_s if key[0] == "F" else stages[key[1]].backward_s
            value = max((end[need] for need in needs), default=0.0) + seconds
            if value > end[key] + 1e-12:
                end[key], changed = value, True
    return max(end.values())


@pytest.mark.parametrize("seed", range(times(gate=30, every=1500)))
def test_the_simulation_is_the_longest_path(seed: int) -> None:
    rng = random.Random(seed)
    stages = [Passes(rng.uniform(0, 2), rng.uniform(0.1, 4)) for _ in range(rng.randint(1, 7))]
    micro_batches = rng.randint(1, 20)
    assert share_seconds(stages, micro_batches) == pytest.approx(by_relaxation(stages, micro_batches), rel=1e-9)


@pytest.mark.parametrize("seed", range(times(gate=10, every=300)))
def test_the_timeline_has_every_pass_once_and_ends_with_the_share(seed: int) -> None:
    rng = random.Random(seed)
    stages = [Passes(rng.uniform(0.1, 2), rng.uniform(0.1, 4)) for _ in range(rng.randint(1, 6))]
    micro_batches = rng.randint(1, 12)
    found = timeline(stages, micro_batches)
    assert max(each.end_s for each in found) == pytest.approx(share_seconds(stages, micro_batches))
    places = [(each.stage, each.forward, each.micro_batch) for each in found]
    assert sorted(places) == sorted(itertools.product(range(len(stages)), (False, True), range(micro_batches)))
    for stage in range(len(stages)):
        own = [each for each in found if each.stage == stage]
        assert all(before.end_s <= after.start_s + 1e-9 for before, after in itertools.pairwise(own))


@pytest.mark.parametrize("seed", range(times(gate=5, every=50)))
def test_rounds_that_repeat_are_skipped_without_an_error(seed: int) -> None:
    rng = random.Random(seed)
    stages = [Passes(rng.uniform(0, 2), rng.uniform(0.1, 4)) for _ in range(4)]
    assert share_seconds(stages, 200) == pytest.approx(by_relaxation(stages, 200), rel=1e-9)


@pytest.mark.parametrize("micro_batches", [8, 9, 64, 256])
def test_equal_stages_take_the_fill_and_then_one_period_for_each_micro_batch(micro_batches: int) -> None:
    stages = [Passes(1.0, 2.0)] * 8
    assert share_seconds(stages, micro_batches) == pytest.approx(8 * 3 + (micro_batches - 1) * 3)


def test_no_schedule_is_shorter_than_the_work_of_one_stage_and_the_way_to_it() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        stages = [Passes(rng.uniform(0.2, 2), rng.uniform(0.2, 2)) for _ in range(rng.randint(2, 6))]
        micro_batches = rng.randint(1, 40)
        total = share_seconds(stages, micro_batches)
        way = 0.0
        for stage in stages:
            assert total >= (way + micro_batches * sum(stage)) * (1 - 1e-12)
            way += sum(stage)


@pytest.mark.parametrize("seed", range(times(gate=4, every=40)))
def test_long_shares_go_on_at_the_pace_of_the_simulated_part(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    stages = [Passes(rng.uniform(0.2, 2), rng.uniform(0.2, 2)) for _ in range(5)]
    assert MOST_SIMULATED == 256
    short = share_seconds(stages, 900)
    monkeypatch.setattr("heterotrain_planner.layout.schedule.MOST_SIMULATED", 1000)
    assert short == pytest.approx(share_seconds(stages, 900), rel=1e-3)


def test_a_stage_that_another_one_hides_at_first_decides_long_shares() -> None:
    """The last stage is 1 % faster than the first one, and begins after fourteen others: that tells for 700 rounds."""
    stages = [Passes(0.5, 0.5), *[Passes(0.25, 0.25)] * 14, Passes(0.495, 0.495)]
    assert share_seconds(stages, 100_000) >= 100_000


def test_the_formula_is_close_for_balanced_stages_only() -> None:
    """Why finalists are ranked by simulation."""

    def errors(spread: float) -> list[float]:
        rng = random.Random(5)
        found = []
        for _ in range(60):
            forward = [rng.uniform(1 - spread, 1 + spread) for _ in range(rng.randint(2, 8))]
            stages = [Passes(each, 2 * each) for each in forward]
            busy = [3 * each for each in forward]
            found.append(share_seconds(stages, 8) / (sum(busy) + 7 * max(busy)) - 1)
        return found

    assert max(map(abs, errors(0.05))) < 0.02
    assert max(map(abs, errors(0.5))) > 0.05


def test_the_formula_is_never_too_short_where_forward_and_backward_have_one_ratio() -> None:
    rng = random.Random(6)
    for _ in range(300):
        ratio = rng.uniform(0.5, 3)
        forward = [rng.uniform(0.1, 2) for _ in range(rng.randint(1, 8))]
        stages = [Passes(each, ratio * each) for each in forward]
        micro_batches = rng.randint(len(stages), 40)
        busy = [sum(each) for each in stages]
        assert share_seconds(stages, micro_batches) <= (sum(busy) + (micro_batches - 1) * max(busy)) * (1 + 1e-12)


def test_no_schedule_is_longer_than_the_slowest_passes_of_either_kind_in_turn() -> None:
    rng = random.Random(7)
    for _ in range(300):
        stages = [Passes(rng.uniform(0, 2), rng.uniform(0.1, 4)) for _ in range(rng.randint(1, 8))]
        micro_batches = rng.randint(1, 40)
        turn = max(each.forward_s for each in stages) + max(each.backward_s for each in stages)
        fill = sum(sum(each) for each in stages)
        assert share_seconds(stages, micro_batches) <= (fill + (micro_batches - 1) * turn) * (1 + 1e-12)
