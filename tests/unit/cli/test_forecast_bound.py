"""The stated distance of a forecast: no allocation and no shares of any random small job are beyond it.

The oracle reads the same documents by itself. It tries every allocation and every division of the batch, and takes the
mean of the maximum by a sum over a fine grid.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from heterotrain_cli.forecast import candidates
from heterotrain_cli.forecast.allocations import forecast_job
from heterotrain_cli.forecast.bound import best_possible
from heterotrain_cli.forecast.job import JobInput, PoolInput
from heterotrain_cli.main import main
from heterotrain_cli.profile import Profile
from heterotrain_core.contract.hiccups import Hiccups
from heterotrain_planner.perf.exchange_sizes import MeasuredExchange
from scipy.special import ndtr
from support.cli_runner import CliRunner
from unit.cli import oracle


def any_member(rng: random.Random) -> dict[str, Any]:
    """Return a member of a profile, sometimes a table, with or without limits and noise."""
    if rng.random() < 0.2:
        speed: dict[str, Any] = {"measured": [[n, rng.uniform(0.05, 0.5)] for n in (1, 3, 6, 12)]}
    else:
        speed = {
            "perSampleSeconds": rng.choice([0.0, 0.01, 0.03]),
            "fixedSeconds": rng.choice([0.0, 0.02, 0.1]),
            "backwardPerSampleSeconds": rng.uniform(0.005, 0.06),
            "backwardFixedSeconds": rng.choice([0.0, 0.03]),
        }
    return {
        **speed,
        **rng.choice([{}, {"maxMicroBatchSamples": rng.randint(1, 4)}]),
        **rng.choice([{}, {}, {"maxSamples": rng.randint(1, 8)}]),
        **rng.choice([{}, {}, {"minSamples": rng.choice([0, 2])}]),
        **rng.choice([{}, {}, {"granularity": 2}]),
    }


def any_case(rng: random.Random, *, noise: bool) -> tuple[JobInput, MeasuredExchange, dict[str, Any]]:
    """Return a job of one or two pools, its exchange, and the profile."""
    names = ["a", "b"][: rng.randint(1, 2)]
    members = [{"name": name, **any_member(rng)} for name in names]
    if noise:
        for member in members:
            member.update(rng.choice([{}, {"variation": rng.choice([0.05, 0.2, 0.4])}]))
    ranks = rng.choice([2, 3])
    document = {
        "members": members,
        "communication": {
            "overlappedSeconds": rng.choice([0, 0.02, 0.1]),
            "lastBucketSeconds": rng.choice([0, 0.01]),
            "gamma": rng.choice([0, 0.3, 1]),
            "ranks": ranks,
        },
    }
    profile = Profile.model_validate(document)
    most = 2 if noise else 3
    pools = tuple(
        PoolInput(
            name=member.name,
            ranks=rng.choice([1, 1, 2]) if not noise else 1,
            least_workers=rng.choice([0, 0, 1]),
            most_workers=rng.randint(1, most),
            spot=False,
            price_per_hour=rng.choice([0.5, 1.0, 4.0]),
            rank=member.curve,
            variation=member.variation,
        )
        for member in profile.members
    )
    job = JobInput(
        name="j",
        namespace=None,
        batch_samples=rng.randint(3, 9 if noise else 24),
        pools=pools,
        least_workers=rng.choice([1, 2]),
        most_workers=rng.randint(2, 5),
        even=False,
        epochs=1,
    )
    return job, profile.measured_exchange, document


def allowed(job: JobInput) -> list[tuple[int, ...]]:
    """Return all numbers of workers that the job allows."""
    axes = [range(pool.least_workers, pool.most_workers + 1) for pool in job.pools]
    return [row for row in itertools.product(*axes) if max(1, job.least_workers) <= sum(row) <= job.most_workers]


def of_allocation(job: JobInput, document: dict[str, Any], workers: tuple[int, ...]) -> dict[str, Any]:
    """Return the profile of the ranks of an allocation, with the exchange among them."""
    counts = [count * pool.ranks for count, pool in zip(workers, job.pools, strict=True)]
    members = [{**m, "count": count} for m, count in zip(document["members"], counts, strict=True) if count]
    exchange = document["communication"]
    n, seen = sum(counts), exchange["ranks"]
    factor = (n - 1) / n / ((seen - 1) / seen)
    scaled = {key: exchange[key] * factor for key in ("overlappedSeconds", "lastBucketSeconds")}
    return {"members": members, "communication": {**scaled, "gamma": exchange["gamma"]}}


LEVELS = 4001


def mean_of_maximum(means: list[float], deviations: list[float], longer: list[float], rate: float) -> float:
    """Return the mean of the largest of independent numbers, by trapezoids above the largest fixed one.

    Each is normal, but in a part ``rate`` of cases by ``longer`` more, and accordingly less in the others.
    """
    every = list(zip(means, deviations, longer, strict=True))
    noisy = [(m - rate * more, d, more) for m, d, more in every if d]
    fixed = max((m for m, d, _ in every if not d), default=-math.inf)
    if not noisy:
        return fixed
    low = max(fixed, *(m - 7 * d for m, d, _ in noisy))
    high = max([low, *(m + more + 7 * d for m, d, more in noisy)])
    levels = np.linspace(low, high, LEVELS)
    below = np.prod(
        [(1 - rate) * ndtr((levels - m) / d) + rate * ndtr((levels - m - more) / d) for m, d, more in noisy], axis=0
    )
    return float(high - np.trapezoid(below, levels))


def least_noisy_step_s(job: JobInput, document: dict[str, Any], workers: tuple[int, ...]) -> float:
    """Return the least mean step of an allocation over every division of the batch."""
    own = of_allocation(job, document, workers)
    members = oracle.singles(own)
    least = math.inf
    for shares in itertools.product(*(oracle.allowed(member, job.batch_samples) for member in members)):
        if sum(shares) == job.batch_samples:
            means = [oracle.step_s(own, member, share) for member, share in zip(members, shares, strict=True)]
            deviations = [
                member.get("variation", 0.0) * oracle.own_s(member, share)
                for member, share in zip(members, shares, strict=True)
            ]
            longer = [
                (job.hiccups.ratio * oracle.own_s(member, share) + job.hiccups.pause_s) * bool(share)
                for member, share in zip(members, shares, strict=True)
            ]
            least = min(least, mean_of_maximum(means, deviations, longer, job.hiccups.rate))
    return least


def check(job: JobInput, exchange: MeasuredExchange, steps: dict[tuple[int, ...], float]) -> float | None:
    """Check the bound against the least steps of all allocations; return the distance of the fastest one."""
    able = {workers: step for workers, step in steps.items() if math.isfinite(step)}
    if not able:
        return None
    prices = [pool.price_per_hour or 0.0 for pool in job.pools]
    rate = max(job.batch_samples / step for step in able.values())
    cost = min(
        1e6 / 3600 * sum(p * n for p, n in zip(prices, workers, strict=True)) * step / job.batch_samples
        for workers, step in able.items()
    )
    # Only half as good an allocation was found so far, so the bound cannot be what was found.
    best = best_possible(job, exchange)
    assert best.samples_per_s >= rate * (1 - 1e-6)
    assert best.cost_per_million <= cost * (1 + 1e-6)
    return best.samples_per_s / rate - 1


def test_no_allocation_of_small_jobs_is_beyond_the_bound() -> None:
    """Without noise: all allocations and divisions of 150 jobs. Nine in ten bounds are close."""
    gaps = []
    for seed in range(150):
        job, exchange, document = any_case(random.Random(seed), noise=False)  # noqa: S311  # drawn jobs
        steps = {w: oracle.least_step_s(of_allocation(job, document, w), job.batch_samples) for w in allowed(job)}
        gaps.append(check(job, exchange, steps))
    known = sorted(gap for gap in gaps if gap is not None)
    assert len(known) > 75
    assert known[len(known) // 2] < 0.03
    assert known[9 * len(known) // 10] < 0.4


def test_no_allocation_of_small_noisy_jobs_is_beyond_the_bound() -> None:
    """With noise: all allocations and divisions of 120 jobs, some members noisier than others."""
    gaps = []
    for seed in range(120):
        job, exchange, document = any_case(random.Random(seed), noise=True)  # noqa: S311  # drawn jobs
        gaps.append(check(job, exchange, {w: least_noisy_step_s(job, document, w) for w in allowed(job)}))
    assert sum(gap is not None for gap in gaps) > 60


def test_no_allocation_of_small_jobs_with_long_steps_is_beyond_the_bound() -> None:
    """With rare long steps of both kinds: all allocations and divisions of 80 jobs."""
    found = 0
    for seed in range(80):
        rng = random.Random(seed)  # noqa: S311  # drawn jobs
        job, exchange, document = any_case(rng, noise=True)
        hiccups = Hiccups(rate=rng.uniform(0.01, 0.2), ratio=rng.uniform(0, 3), pause_s=rng.choice([0.0, 0.1, 1.0]))
        for member in document["members"]:
            member["variation"] = rng.choice([0.05, 0.2, 0.4])
        noisy = zip(job.pools, document["members"], strict=True)
        pools = tuple(replace(pool, variation=member["variation"]) for pool, member in noisy)
        job = replace(job, pools=pools, hiccups=hiccups)
        found += check(job, exchange, {w: least_noisy_step_s(job, document, w) for w in allowed(job)}) is not None
    assert found > 40


def test_the_forecast_states_a_true_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """With only a few allocations compared, the fastest and the cheapest one are as close as the forecast says."""
    monkeypatch.setattr(candidates, "MAX_CANDIDATES", 3)
    monkeypatch.setattr(candidates, "MOST_MOVES", 1)
    apart = 0
    for seed in range(60):
        job, exchange, document = any_case(random.Random(seed), noise=False)  # noqa: S311  # drawn jobs
        found = forecast_job(job, exchange)
        steps = {w: oracle.least_step_s(of_allocation(job, document, w), job.batch_samples) for w in allowed(job)}
        able = {workers: step for workers, step in steps.items() if math.isfinite(step)}
        if not found.alternatives:
            continue
        reached_s = found.alternatives[0].step_s
        gain = reached_s / min(able.values()) - 1
        assert found.speed_gain >= gain * (1 - 1e-6) - 1e-6
        apart += gain > 0.01
    assert apart >= 1, "with few allocations compared, some better one is missed"


def job_and_profile(folder: Path, most: int) -> list[str]:
    """Write a job of three pools and return the command for its forecast."""
    pools = [{"name": n, "maxReplicas": most, "pricePerHour": p} for n, p in (("a", "4"), ("b", "2"), ("c", "0.5"))]
    job = {
        "apiVersion": "heterotrain.dev/v1alpha1",
        "kind": "HeteroTrainJob",
        "metadata": {"name": "digits"},
        "spec": {
            "training": {"globalBatchSize": 4096, "epochs": 3},
            "elasticPolicy": {"minReplicas": 1, "maxReplicas": 3 * most},
            "workerPools": pools,
            "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
        },
    }
    profile = {
        "communication": {"overlappedSeconds": 0.05, "lastBucketSeconds": 0.02, "gamma": 0.2},
        "members": [
            {"name": name, "perSampleSeconds": x, "backwardPerSampleSeconds": 2 * x, "fixedSeconds": 0.05}
            for name, x in (("a", 0.001), ("b", 0.003), ("c", 0.009))
        ],
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    (folder / "profile.yaml").write_text(yaml.safe_dump(profile), encoding="utf-8")
    return ["forecast", str(folder / "job.yaml"), "--profile", str(folder / "profile.yaml")]


def test_text_and_document_state_the_distance(tmp_path: Path) -> None:
    """A forecast that compared some of many allocations prints and returns the distance, another one needs none."""
    command = job_and_profile(tmp_path, 24)
    document = json.loads(CliRunner().invoke(main, [*command, "-o", "json"], catch_exceptions=False).stdout)
    assert document["comparedAll"] is False
    assert 0 <= document["mostSpeedGain"] < 0.15
    assert 0 <= document["mostCostGain"] < 0.15
    lines = CliRunner().invoke(main, command, catch_exceptions=False).stdout.splitlines()
    stated = next(line for line in lines if line.startswith("the fastest one: at most "))
    assert stated.endswith(" % from the best possible; the cheapest one: no allocation is better")
    command = job_and_profile(tmp_path, 4)
    document = json.loads(CliRunner().invoke(main, [*command, "-o", "json"], catch_exceptions=False).stdout)
    assert (document["comparedAll"], document["mostSpeedGain"], document["mostCostGain"]) == (True, 0, 0)
    assert "the fastest one" not in CliRunner().invoke(main, command, catch_exceptions=False).stdout
