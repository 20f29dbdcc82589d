"""Noise in forecasts, against steps that are drawn one by one: each the maximum over members that vary."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from heterotrain_cli.main import main
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.hiccups import Hiccups
from heterotrain_planner.perf.expected_maximum import balanced_ceiling
from support.cli_runner import CliRunner
from unit.cli import oracle
from unit.cli.test_forecast_job import JOB, PROFILE, a_plan, answer, folder, run, running, write  # noqa: F401  # fixtures

DRAWS = 100_000
NORMAL = np.random.default_rng(5).standard_normal((DRAWS, 12))


def drawn_step_s(document: dict[str, Any], members: list[dict[str, Any]], shares: list[int]) -> float:
    """Return the mean step of these members, by drawing steps; only a member's own time varies."""
    steps = np.zeros(DRAWS)
    for column, (member, share) in enumerate(zip(members, shares, strict=True)):
        deviation_s = member.get("variation", 0.0) * oracle.own_s(member, share)
        steps = np.maximum(steps, oracle.step_s(document, member, share) + deviation_s * NORMAL[:, column])
    return float(steps.mean())


def forecast(tmp_path: Path, document: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return the forecast of a profile alone."""
    file = tmp_path / "profile.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    result = CliRunner().invoke(main, ["forecast", "--profile", str(file), "--batch", str(batch), "-o", "json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def any_profile(rng: random.Random) -> dict[str, Any]:
    """Return a profile of two to eight members, some quiet, some noisy, with an exchange."""
    members = [
        {
            "name": f"m{i}",
            "count": rng.randint(1, 4),
            "perSampleSeconds": rng.uniform(0.001, 0.01),
            "fixedSeconds": rng.uniform(0, 0.05),
            "backwardPerSampleSeconds": rng.uniform(0.001, 0.02),
            **rng.choice([{}, {"variation": 0.0}, {"variation": rng.uniform(0.02, 0.3)}]),
        }
        for i in range(2)
    ]
    exchange = {"overlappedSeconds": rng.uniform(0, 0.2), "lastBucketSeconds": rng.uniform(0, 0.05), "gamma": 0.3}
    return {"members": members, "communication": exchange}


def test_the_step_is_the_mean_of_drawn_maxima(tmp_path: Path) -> None:
    """For any members and variations, within the error of the draws."""
    rng = random.Random(2)  # noqa: S311  # drawn profiles
    noisy = 0
    for _ in range(25):
        document = any_profile(rng)
        members = oracle.singles(document)
        found = forecast(tmp_path, document, 40 * len(members))
        shares = [row["samples"] for row in found["members"]]
        assert found["stepSeconds"] == pytest.approx(drawn_step_s(document, members, shares), rel=3e-3)
        quiet_s = max(oracle.step_s(document, m, n) for m, n in zip(members, shares, strict=True))
        assert found["stepSecondsWithoutNoise"] == pytest.approx(quiet_s)
        assert found["samplesPerSecond"] == pytest.approx(sum(shares) / found["stepSeconds"])
        solo = sum(n / oracle.own_s(m, n) for m, n in zip(members, shares, strict=True) if n)
        assert found["efficiency"] == pytest.approx(found["samplesPerSecond"] / solo)
        noisy += found["stepSeconds"] > 1.02 * quiet_s
    assert noisy >= 8


def test_noisy_members_get_fewer_samples(tmp_path: Path) -> None:
    """Of all divisions with equal shares for equal members, drawn with the same numbers, none is 1 % faster."""
    document = {
        "members": [
            {"name": "quiet", "count": 9, "perSampleSeconds": 0.01, "fixedSeconds": 0.01, "variation": 0.03},
            {"name": "noisy", "count": 3, "perSampleSeconds": 0.01, "fixedSeconds": 0.01, "variation": 0.25},
        ]
    }
    found = forecast(tmp_path, document, 480)
    members = oracle.singles(document)
    steps = {n: drawn_step_s(document, members, [n] * 9 + [160 - 3 * n] * 3) for n in range(36, 53)}
    assert max(row["samples"] for row in found["members"][9:]) < 40
    assert found["stepSeconds"] <= min(steps.values()) * 1.01
    assert found["stepSeconds"] < steps[40] * 0.96


def test_epoch_cost_and_alternatives_of_a_job_include_noise(folder: Path) -> None:  # noqa: F811  # fixture
    """Each alternative has the mean of drawn steps; the text says how much longer noise makes a step."""
    variations = {"a100": 0.05, "v100": 0.15, "t4": 0.1}
    members = [{**each, "variation": variations[each["name"]]} for each in PROFILE["members"]]
    # Batches that every allocation divides evenly within pools are rare, so pools have one rank each.
    job = json.loads(json.dumps(JOB))
    for pool in job["spec"]["workerPools"]:
        pool["maxReplicas"] = 1
        pool["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    profile = {"members": members, "communication": {**PROFILE["communication"], "ranks": 3}}
    write(folder, job, profile)
    found = answer(folder, "--samples-per-epoch", "6000")
    by_name = {each["name"]: each for each in members}
    sizes = set()
    for each in [found, *found["alternatives"]]:
        names, shares = zip(*((pool["name"], pool["samplesPerRank"][0]) for pool in each["pools"]), strict=True)
        factor = (len(names) - 1) / len(names) / (2 / 3)
        exchange = {"overlappedSeconds": 0.05 * factor, "lastBucketSeconds": 0.02 * factor, "gamma": 0.2}
        step_s = drawn_step_s({"communication": exchange}, [by_name[name] for name in names], list(shares))
        assert each["stepSeconds"] == pytest.approx(step_s, rel=3e-3)
        assert each["secondsPerEpoch"] == pytest.approx(100 * each["stepSeconds"])
        assert each["costPerEpoch"] == pytest.approx(each["pricePerHour"] * 100 * each["stepSeconds"] / 3600)
        sizes.add(len(names))
    assert {1, 3} <= sizes
    assert found["stepSeconds"] > 1.03 * found["stepSecondsWithoutNoise"]
    assert "steps of single ranks vary by 5.0% to 15.0%, which makes a step" in run(folder).stdout
    del members[1]["variation"]
    write(folder, job, profile)
    assert "; the noise of others is not known and left out" in run(folder).stdout


def test_a_running_job_s_noise_follows_from_its_ceiling(folder: Path, running: Any) -> None:  # noqa: F811  # fixture
    """Three members with a ceiling of 0.93: balanced members that vary so reach 0.93 of the sum of their rates."""
    running(encode_plan(a_plan()), {})
    arguments = ["forecast", str(folder / "job.yaml"), "--cluster", "-n", "ml", "-o", "json"]
    found = json.loads(CliRunner().invoke(main, arguments, catch_exceptions=False).stdout)
    variation = found["pools"][0]["variation"]
    assert 1 / (1 + variation * float(NORMAL[:, :3].max(axis=1).mean())) == pytest.approx(0.93, abs=1e-3)
    assert found["stepSeconds"] > 1.05 * found["stepSecondsWithoutNoise"]


def test_a_running_job_s_long_steps_make_every_allocation_slower(
    folder: Path,  # noqa: F811  # fixture
    running: Any,  # noqa: F811  # fixture
) -> None:
    """One step in fifty is longer by 0.3 s; no other noise. Each alternative has the mean of drawn steps."""
    hiccups = Hiccups(rate=0.02, pause_s=0.3)
    plan = a_plan()
    assert plan.prediction is not None
    ceiling = balanced_ceiling([0.0] * 3, hiccups.relative_to(0.1))
    prediction = replace(plan.prediction, efficiency_ceiling=ceiling, hiccups=hiccups, own_s=0.1)
    running(encode_plan(replace(plan, prediction=prediction)), {})
    arguments = ["forecast", str(folder / "job.yaml"), "--cluster", "-n", "ml", "-o", "json"]
    found = json.loads(CliRunner().invoke(main, arguments, catch_exceptions=False).stdout)
    compared = 0
    for each in [found, *found["alternatives"]]:
        least, most = each["pools"][0]["samplesPerRank"]
        if len(each["pools"]) > 1 or least != most:
            continue
        # Members of one pool with equal shares end together, so a step is longer if any of them pauses.
        mean_s = hiccups.pause_s * (1 - (1 - hiccups.rate) ** each["pools"][0]["ranks"] - hiccups.rate)
        assert each["stepSeconds"] - each["stepSecondsWithoutNoise"] == pytest.approx(mean_s, abs=5e-4)
        compared += 1
    assert compared


@pytest.mark.parametrize("wrong", [-0.1, 1.5, "much"])
def test_a_variation_that_cannot_be_is_refused(folder: Path, wrong: object) -> None:  # noqa: F811  # fixture
    members = [{**each, "variation": wrong} for each in PROFILE["members"]]
    write(folder, JOB, {**PROFILE, "members": members})
    result = run(folder)
    assert result.exit_code == 2
    assert "members[0].variation" in result.stderr
