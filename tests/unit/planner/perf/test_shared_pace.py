"""The shared pace of all members is found and removed from their lines, and none is invented."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from heterotrain_core.contract.plan import ComputeTime
from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.expected_maximum import expected_maximum
from heterotrain_planner.perf.fit import fit_data
from heterotrain_planner.perf.line import persistence
from heterotrain_planner.perf.model import MemberModel, compute_s
from heterotrain_planner.perf.regression_data import summarize
from heterotrain_planner.perf.shared_pace import own_variations, remove_shared_pace
from heterotrain_planner.planning import fitting
from heterotrain_planner.planning.evidence import MemberEvidence
from heterotrain_planner.planning.fitting import fit_members
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PACES_S = (0.001, 0.002, 0.004)
FIXED_S = 0.02
SHARES = ((256, 128, 64), (128, 192, 96), (320, 96, 32))
OWN = 0.04


def walk(chance: np.random.Generator, steps: int, correlation: float) -> Floats:
    """Return a stationary series of deviation 1, each value correlated with the one before."""
    found = [float(chance.standard_normal())]
    for fresh in chance.standard_normal(steps - 1).tolist():
        found.append(correlation * found[-1] + math.sqrt(1 - correlation**2) * fresh)
    return np.array(found)


def run(
    common: float, *, seed: int, scrapes: int = 24, steps: int = 3, late: int = 0, cold: float = 1.0
) -> list[list[Observation]]:
    """Return observations of three members that take turns with three share vectors; one is scraped some steps later.

    Their first three steps take ``cold`` times as long.
    """
    chance = np.random.default_rng(seed)
    total = scrapes * steps + late
    shared_N = common * walk(chance, total, 0.98)
    own_NW = OWN * chance.standard_normal((total, 3))
    vectors = [SHARES[n // steps % 3] for n in range(total)]
    seconds_NW = np.array(
        [[pace * share + FIXED_S for pace, share in zip(PACES_S, v, strict=True)] for v in vectors]
    ) * np.exp(shared_N[:, None] + own_NW)
    seconds_NW[:3] *= cold
    step_N = seconds_NW.max(axis=1)
    found: list[list[Observation]] = []
    for rank in range(3):
        mine: list[Observation] = []
        begin = 0
        for scrape in range(1, scrapes + 1):
            end = scrape * steps + (late if rank == 1 else 0)
            for share in sorted({vectors[n][rank] for n in range(begin, end)}):
                at = [n for n in range(begin, end) if vectors[n][rank] == share]
                own, step = seconds_NW[at, rank], step_N[at]
                mine.append(
                    Observation(
                        member=f"w{rank}",
                        share_samples=share,
                        steps=len(at),
                        ended_s=float(step_N[:end].sum()),
                        warm_up=cold != 1.0 and scrape == 1,
                        compute=moments(own),
                        step=moments(step),
                        sync=moments(step - own),
                    )
                )
            begin = end
        found.append(mine)
    return found


def moments(values: Floats) -> MeanVariance:
    return MeanVariance(mean=float(values.mean()), variance=float(values.var(ddof=1)) if len(values) > 1 else None)


def off(compute: ComputeTime, pace_s: float, share: int) -> float:
    return math.log(compute_s(compute, share) / (pace_s * share + FIXED_S))


def spread_and_error(seen: list[list[Observation]], *, without: bool) -> tuple[float, float]:
    """Return the spread of the members' relative errors at their shares, and the stated error."""
    data = [summarize(mine) for mine in seen]
    models = [fit_data(each) for each in data]
    if without:
        models = [fit_data(each) for each in remove_shared_pace(data, models).data]
    errors, said = [], []
    for model, pace, share in zip(models, PACES_S, SHARES[0], strict=True):
        assert model.compute is not None
        assert model.error is not None
        errors.append(off(model.compute, pace, share))
        said.append(model.error.at(share) / (pace * share + FIXED_S))
    return float(np.std(errors)), float(np.mean(said))


@pytest.mark.parametrize("late", [0, 1])
def test_members_are_distinguished_despite_a_shared_pace(late: int) -> None:
    """Noise of 12 % shared and 4 % own: the stated error of the lines is about the real one, not three times it."""
    runs = [run(0.12, seed=seed, late=late) for seed in range(30)]
    plain, doubted = np.mean([spread_and_error(seen, without=False) for seen in runs], axis=0)
    found, said = np.mean([spread_and_error(seen, without=True) for seen in runs], axis=0)
    assert found < 0.95 * plain
    assert doubted > 2 * plain
    assert 0.7 * found < said < 1.5 * found


def test_no_shared_pace_is_invented() -> None:
    """Independent noise is barely changed, and a single member not at all."""
    for seed in range(5):
        data = [summarize(mine) for mine in run(0.0, seed=seed)]
        models = [fit_data(each) for each in data]
        found = remove_shared_pace(data, models)
        assert abs(math.log(found.now_ratio)) < 0.02
        for before, after in zip(data, found.data, strict=True):
            assert before is not None
            assert after is not None
            assert float(np.abs(np.log(after.seconds_O / before.seconds_O)).max()) < OWN
    alone = remove_shared_pace([data[0], None], [models[0], fit_data(None)])
    assert alone.data == (data[0], None)
    assert alone.now_ratio == 1.0


def test_a_recent_slowdown_of_all_keeps_their_proportions() -> None:
    """All members take 1.15 times as long in the last twenty scrapes: the models show it, in the same proportions."""
    seen = run(0.0, seed=4, scrapes=60)
    slowed = [[o if i < len(mine) * 2 // 3 else slower(o, 1.15) for i, o in enumerate(mine)] for mine in seen]
    models = models_of(slowed)
    errors = [
        off(model.compute, pace, share)
        for model, pace, share in zip(models, PACES_S, (288, 144, 72), strict=True)
        if model.compute is not None
    ]
    assert errors == pytest.approx([math.log(1.15)] * 3, abs=0.03)


def test_first_steps_do_not_set_the_current_pace() -> None:
    """Three steps at 1.5 times the time, in scrapes of one step: twelve steps later the predictions are right again."""
    errors = []
    for seed in range(20):
        seen = run(0.0, seed=seed, scrapes=12, steps=1, cold=1.5)
        models = models_of(seen)
        errors += [
            off(model.compute, pace, share)
            for model, pace, share in zip(models, PACES_S, (288, 144, 72), strict=True)
            if model.compute is not None
        ]
    assert len(errors) == 60
    assert abs(float(np.mean(errors))) < 0.02


def models_of(seen: Sequence[Sequence[Observation]]) -> list[MemberModel]:
    """Return the models that a plan would use."""
    evidence = [MemberEvidence(member=f"w{i}", observations=tuple(mine)) for i, mine in enumerate(seen)]
    return list(fit_members(evidence).models())


def changed(ratios: tuple[float, float, float], seed: int) -> list[MemberModel]:
    """Return the models of three members that become slower by these ratios for the last 30 of 90 steps."""
    seen = run(0.03, seed=seed, scrapes=30)
    slowed = [
        [slower(o, ratio) if at >= len(mine) * 2 // 3 else o for at, o in enumerate(mine)]
        for mine, ratio in zip(seen, ratios, strict=True)
    ]
    return models_of(slowed)


def test_a_slowdown_of_all_is_not_a_change_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared slowdown near the limit of a change: members just above and below the limit are treated alike."""

    def apart() -> float:
        spreads = []
        for seed in range(12):
            models = changed((1.23, 1.23, 1.23), seed)
            errors = [
                off(m.compute, p, n) for m, p, n in zip(models, PACES_S, (288, 144, 72), strict=True) if m.compute
            ]
            spreads.append(max(errors) - min(errors))
        return float(np.mean(spreads))

    found = apart()
    monkeypatch.setattr(fitting, "shared_slowdown", lambda *_: None)
    assert found < 0.8 * apart()


def test_a_change_of_one_is_not_a_slowdown_of_all() -> None:
    for seed in range(6):
        ratios = [model.drift_ratio for model in changed((1.0, 1.5, 1.0), seed)]
        assert ratios == pytest.approx([1.0, 1.5, 1.0], rel=0.12)


def test_a_change_of_all_and_one_more_of_one_is_found() -> None:
    for seed in range(6):
        models = changed((1.15, 1.15, 2.0), seed)
        errors = [off(m.compute, p, n) for m, p, n in zip(models, PACES_S, (288, 144, 72), strict=True) if m.compute]
        assert errors == pytest.approx([math.log(1.15), math.log(1.15), math.log(2.0)], abs=0.1)


def slower(o: Observation, ratio: float) -> Observation:
    def stretched(m: MeanVariance | None) -> MeanVariance | None:
        return m and MeanVariance(mean=ratio * m.mean, variance=m.variance and ratio**2 * m.variance)

    return Observation(
        member=o.member,
        share_samples=o.share_samples,
        steps=o.steps,
        ended_s=o.ended_s,
        compute=stretched(o.compute),
        step=stretched(o.step),
        sync=stretched(o.sync),
    )


@pytest.mark.parametrize("common", [0.0, 0.06, 0.12])
def test_the_mean_step_follows_from_own_variations(common: float) -> None:
    """Balanced members: the mean of the maximum follows from their own parts, found from three exported variances."""
    chance = np.random.default_rng(3)
    shared_N, own_NW = 1 + common * chance.standard_normal(6000), OWN * chance.standard_normal((6000, 3))
    seconds_NW = shared_N[:, None] * (1 + own_NW)
    step_N = seconds_NW.max(axis=1)
    seen = [
        [
            Observation(
                member=f"w{rank}",
                share_samples=10,
                steps=6,
                ended_s=float(at),
                compute=moments(seconds_NW[at : at + 6, rank]),
                step=moments(step_N[at : at + 6]),
                sync=moments((step_N - seconds_NW[:, rank])[at : at + 6]),
            )
            for at in range(0, 6000, 6)
        ]
        for rank in range(3)
    ]
    total = math.hypot(common, OWN)
    own = own_variations(seen, [total] * 3)
    assert own == pytest.approx([OWN] * 3, rel=0.1)
    assert expected_maximum([1.0] * 3, own) == pytest.approx(float(step_N.mean()), abs=0.005)


def test_without_evidence_the_whole_variation_is_own() -> None:
    assert own_variations([[], []], [0.1, 0.2]) == (0.1, 0.2)
    assert own_variations([run(0.1, seed=1)[0]], [0.1]) == (0.1,)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_persistent_noise_is_counted_once(correlation: float) -> None:
    """The variance of the sum over 60 values, about their own mean as after a fit, is that of the process."""
    chance, n = np.random.default_rng(5), 60
    series = [walk(chance, n, correlation) for _ in range(400)]
    truth = float(np.var([each.sum() for each in series])) / n
    found = [persistence(each - each.mean()) for each in series]
    assert float(np.median(found)) == pytest.approx(truth, rel=0.25)


def test_steps_of_no_measurable_length_have_no_part_in_it() -> None:
    """The square of such a mean is zero."""
    chance = np.random.default_rng(4)
    seconds_NW = 1 + OWN * chance.standard_normal((60, 2))
    seen = [
        Observation(
            member="w0", share_samples=10, steps=6, ended_s=float(at),
            compute=moments(1e-300 * seconds_NW[at : at + 6, 0]), step=moments(seconds_NW[at : at + 6, 0]),
            sync=moments(seconds_NW[at : at + 6, 1]),
        )
        for at in range(0, 60, 6)
    ]  # fmt: skip
    assert own_variations([seen, seen], [OWN] * 2) == (OWN, OWN)
