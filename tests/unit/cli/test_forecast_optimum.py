"""The forecast's answer is the true optimum and keeps every limit, against brute force on adversarial profiles."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from heterotrain_cli.main import main
from hypothesis import given
from hypothesis import strategies as st
from support.cli_runner import CliRunner
from unit.cli import oracle

seconds = st.sampled_from([0.0, 1e-4, 3e-4, 1e-3, 2.5e-3, 7e-3, 0.01, 0.03, 0.2, 1.0])
positive_seconds = st.sampled_from([1e-4, 3e-4, 1e-3, 2.5e-3, 7e-3, 0.01, 0.03, 0.2, 1.0])


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Limits of a member, each optional."""
    found: dict[str, Any] = {}
    if draw(st.booleans()):
        found["count"] = draw(st.integers(1, 3))
    if draw(st.booleans()):
        found["minSamples"] = draw(st.integers(0, 5))
    if draw(st.booleans()):
        found["maxSamples"] = draw(st.integers(0, 25))
    if draw(st.booleans()):
        found["maxMicroBatchSamples"] = draw(st.integers(1, 9))
    if draw(st.booleans()):
        found["granularity"] = draw(st.integers(1, 5))
    return found


@st.composite
def by_coefficients(draw: st.DrawFn) -> dict[str, Any]:
    """A member's coefficients, most of them zero or absent."""
    names = ["perSampleSeconds", "fixedSeconds", "backwardPerSampleSeconds", "backwardFixedSeconds"]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    member = {name: draw(seconds) for name in chosen}
    member[chosen[0]] = draw(positive_seconds)
    return member


@st.composite
def by_table(draw: st.DrawFn) -> dict[str, Any]:
    """A table without any order of its times."""
    samples = draw(st.lists(st.integers(1, 24), min_size=1, max_size=5, unique=True))
    return {"measured": [[n, draw(positive_seconds)] for n in samples]}


@st.composite
def profiles(draw: st.DrawFn, *, most_entries: int = 4) -> dict[str, Any]:
    """A whole profile."""
    members = [
        {"name": draw(st.sampled_from(["a", "b"])), **draw(st.one_of(by_coefficients(), by_table())), **draw(limits())}
        for _ in range(draw(st.integers(1, most_entries)))
    ]
    document: dict[str, Any] = {"members": members}
    if draw(st.booleans()):
        document["communication"] = {
            "overlappedSeconds": draw(seconds),
            "lastBucketSeconds": draw(seconds),
            "gamma": draw(st.sampled_from([0.0, 0.15, 0.5, 1.0])),
        }
    return document


def forecast(document: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return the JSON output of the command."""
    arguments = ["forecast", "--profile", "-", "--batch", str(batch), "-o", "json"]
    result = CliRunner().invoke(main, arguments, input=json.dumps(document), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.output)
    return answer


def check(document: dict[str, Any], batch: int) -> dict[str, Any]:
    """Check every value of a forecast against the profile."""
    answer = forecast(document, batch)
    keys = "feasible", "reason", "stepSeconds", "stepSecondsWithoutNoise", "samplesPerSecond", "efficiency", "members"
    assert tuple(answer) == keys
    assert answer["stepSecondsWithoutNoise"] == answer["stepSeconds"], "these profiles have no noise"
    best_s = oracle.least_step_s(document, batch)
    assert answer["feasible"] == (best_s < math.inf), answer["reason"]
    assert answer["reason"]
    if not answer["feasible"]:
        assert (answer["stepSeconds"], answer["samplesPerSecond"], answer["efficiency"]) == (None, None, None)
        assert answer["members"] == []
        return answer
    members = oracle.singles(document)
    shares = [row["samples"] for row in answer["members"]]
    assert [row["name"] for row in answer["members"]] == [member["name"] for member in members]
    assert sum(shares) == batch
    solo = 0.0
    for member, row in zip(members, answer["members"], strict=True):
        assert row["samples"] in oracle.allowed(member, batch)
        assert row["microBatches"] == len(oracle.micro_batches(member, row["samples"]))
        assert row["binding"] in {"Compute", "Communication", "Memory", "Floor"}
        if row["samples"]:
            solo += row["samples"] / oracle.own_s(member, row["samples"])
    reached_s = max(oracle.step_s(document, m, n) for m, n in zip(members, shares, strict=True))
    assert reached_s == pytest.approx(best_s, rel=1e-9)
    assert answer["stepSeconds"] == pytest.approx(best_s, rel=1e-9)
    assert answer["samplesPerSecond"] == pytest.approx(batch / best_s, rel=1e-9)
    assert answer["efficiency"] == pytest.approx(batch / best_s / solo, rel=1e-9)
    return answer


@given(profiles(), st.integers(1, 60))
def test_least_step_time_of_any_profile(document: dict[str, Any], batch: int) -> None:
    """Tables that are not convex, caps, micro-batches, odd granularities, zero floors: the optimum, or none."""
    check(document, batch)


@given(profiles(most_entries=2), st.integers(1, 12))
def test_the_oracle_agrees_with_plain_enumeration(document: dict[str, Any], batch: int) -> None:
    """The dynamic programme of the oracle is correct."""
    if len(oracle.singles(document)) <= 4:
        assert oracle.least_step_s(document, batch) == oracle.enumerate_all(document, batch)


@given(profiles(), st.integers(1, 60))
def test_compute_and_communication_are_the_larger_term(document: dict[str, Any], batch: int) -> None:
    """A member without a binding memory or floor is bound by the larger of its two terms; ties count as compute."""
    answer = forecast(document, batch)
    if not answer["feasible"]:
        return
    for member, row in zip(oracle.singles(document), answer["members"], strict=True):
        compute_s, communication_s = oracle.terms(document, member, row["samples"])
        if abs(compute_s - communication_s) < 1e-12 and row["binding"] == "Communication":
            continue  # equal up to rounding
        if row["binding"] == "Compute":
            assert compute_s >= communication_s - 1e-12
        elif row["binding"] == "Communication":
            assert communication_s > compute_s


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "one member takes all": ({"members": [{"name": "x", "perSampleSeconds": 0.1}]}, 7),
    "a table that falls: 8 samples are faster than 5": (
        {
            "members": [
                {"name": "x", "measured": [[1, 1.0], [5, 4.0], [8, 0.5]]},
                {"name": "y", "perSampleSeconds": 0.3},
            ]
        },
        10,
    ),
    "granularity 4 and 6 cannot make 10 with floor 4": (
        {
            "members": [
                {"name": "x", "perSampleSeconds": 1, "granularity": 4, "count": 2},
                {"name": "y", "perSampleSeconds": 1, "granularity": 6},
            ]
        },
        15,
    ),
    "granularity leaves a remainder that only one member can take": (
        {
            "members": [
                {"name": "x", "perSampleSeconds": 0.01, "granularity": 8, "count": 3},
                {"name": "y", "perSampleSeconds": 1},
            ]
        },
        50,
    ),
    "a granularity above the cap with floor 0 leaves a member out": (
        {
            "members": [
                {"name": "x", "perSampleSeconds": 1, "granularity": 8, "maxSamples": 7, "minSamples": 0},
                {"name": "y", "perSampleSeconds": 1},
            ]
        },
        5,
    ),
    "a slow member that may be left out is left out": (
        {
            "members": [
                {"name": "fast", "perSampleSeconds": 1e-3},
                {"name": "slow", "perSampleSeconds": 9, "minSamples": 0},
            ]
        },
        30,
    ),
    "a slow member that may not": (
        {"members": [{"name": "fast", "perSampleSeconds": 1e-3}, {"name": "slow", "perSampleSeconds": 9}]},
        30,
    ),
    "only fixed costs": ({"members": [{"name": "x", "fixedSeconds": 0.5, "count": 3}]}, 31),
    "only backward, gamma 1": (
        {
            "communication": {"overlappedSeconds": 1, "gamma": 1},
            "members": [{"name": "x", "backwardPerSampleSeconds": 0.1, "count": 2}],
        },
        9,
    ),
    "micro-batches of one sample": (
        {
            "members": [
                {"name": "x", "perSampleSeconds": 0.1, "fixedSeconds": 0.3, "maxMicroBatchSamples": 1, "count": 2},
                {"name": "y", "perSampleSeconds": 0.5},
            ]
        },
        20,
    ),
    "accumulating costs more than a slower member": (
        {
            "members": [
                {"name": "x", "perSampleSeconds": 0.01, "fixedSeconds": 5, "maxMicroBatchSamples": 8},
                {"name": "y", "perSampleSeconds": 0.5},
            ]
        },
        20,
    ),
    "caps leave just enough": ({"members": [{"name": "x", "perSampleSeconds": 1, "maxSamples": 3, "count": 4}]}, 12),
    "caps leave one too few": ({"members": [{"name": "x", "perSampleSeconds": 1, "maxSamples": 3, "count": 4}]}, 13),
    "a measured table below its first point": (
        {
            "members": [
                {"name": "x", "measured": [[8, 0.4], [16, 0.5]], "minSamples": 0},
                {"name": "y", "perSampleSeconds": 0.2},
            ]
        },
        5,
    ),
    "times that are 300 magnitudes apart do not overflow": (
        {
            "members": [
                {"name": "x", "perSampleSeconds": 1e-300, "fixedSeconds": 1e-9},
                {"name": "y", "perSampleSeconds": 1e9},
            ]
        },
        40,
    ),
    "micro-batches of a table": (
        {
            "members": [
                {"name": "x", "measured": [[1, 0.1], [4, 0.2], [40, 9.0]], "maxMicroBatchSamples": 4},
                {"name": "y", "perSampleSeconds": 0.9},
            ]
        },
        30,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_named_cases(name: str) -> None:
    """Difficult profiles."""
    document, batch = CASES[name]
    check(document, batch)


def test_equal_members_get_equal_shares_up_to_one() -> None:
    """Members of one entry differ by at most one sample."""
    document = {"members": [{"name": "x", "perSampleSeconds": 0.1, "fixedSeconds": 0.2, "count": 7}]}
    shares = [row["samples"] for row in check(document, 45)["members"]]
    assert max(shares) - min(shares) <= 1


def test_huge_counts_and_batches() -> None:
    """Thousands of members and millions of samples have a forecast, with even shares for equal members."""
    document = {"members": [{"name": "x", "perSampleSeconds": 1e-3, "count": 20_000}]}
    answer = forecast(document, 4_000_003)
    shares = [row["samples"] for row in answer["members"]]
    assert len(shares) == 20_000
    assert sum(shares) == 4_000_003
    assert (min(shares), max(shares)) == (200, 201)
    assert answer["stepSeconds"] == pytest.approx(0.201)


def test_bindings_of_a_plain_case() -> None:
    """A capped, a floored, a waiting and a computing member have different bindings."""
    document = {
        "communication": {"overlappedSeconds": 1.0, "lastBucketSeconds": 0.1, "gamma": 0.5},
        "members": [
            {"name": "small memory", "perSampleSeconds": 0.001, "maxSamples": 4},
            {"name": "slow", "perSampleSeconds": 30.0},
            {"name": "long backward", "perSampleSeconds": 0.001, "backwardPerSampleSeconds": 0.5},
            {"name": "short backward", "perSampleSeconds": 0.5, "backwardPerSampleSeconds": 0.001},
        ],
    }
    found = {row["name"]: row["binding"] for row in check(document, 30)["members"]}
    assert found == {
        "small memory": "Memory",
        "slow": "Floor",
        "long backward": "Compute",
        "short backward": "Communication",
    }
