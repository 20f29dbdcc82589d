"""``heterotrain forecast --model``: the file, the answer, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import Result
from heterotrain_cli.forecast.command import forecast
from heterotrain_cli.layouts.forecast import MODES
from heterotrain_cli.main import main
from support.cli_runner import CliRunner

MB = 10**6
GIB = 1024**3


def measured(forward_s: float) -> list[dict[str, Any]]:
    return [{"microBatchSamples": 1, "forwardSeconds": forward_s, "backwardSeconds": 2 * forward_s}]


def model(**devices: tuple[int, float]) -> dict[str, Any]:
    """Return twelve equal units of 400 MB of training state each, on these devices: (count, GiB)."""
    speeds = {"fast": 0.01, "slow": 0.03}
    return {
        "units": [{
            "name": "blocks", "count": 12, "parameterBytes": 100 * MB, "activationBytes": 10 * MB,
            "boundaryBytes": 1000, "seconds": {kind: measured(speeds[kind]) for kind in devices},
        }],
        "devices": [
            {"name": kind, "count": count, "memoryGib": gib, "pricePerHour": 3.6}
            for kind, (count, gib) in devices.items()
        ],
        "microBatches": [1, 2],
    }  # fmt: skip


def run(folder: Path, document: dict[str, Any], *more: str) -> Result:
    (folder / "model.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return CliRunner().invoke(main, ["forecast", "--model", str(folder / "model.yaml"), *more], catch_exceptions=False)


def answer(folder: Path, document: dict[str, Any], *more: str) -> dict[str, Any]:
    result = run(folder, document, *more, "-o", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_model_that_fits_each_device_is_replicated(tmp_path: Path) -> None:
    network = {"defaultLink": {"gbitPerSecond": 80, "latencySeconds": 0.001}}
    found = answer(tmp_path, model(fast=(2, 10.0)) | network, "--batch", "60")
    assert [member["kind"] for member in found["members"]] == ["Replicated"] * 2
    # A ring of two: each sends half of the gradients twice, at 10 GB/s.
    step_s = 30 * 12 * 0.03 + 2 * (0.001 + 600 * MB / 1e10)
    assert found["stepSeconds"] == pytest.approx(step_s)
    assert found["samplesPerSecond"] == pytest.approx(60 / step_s)
    assert found["samplesPerSecond"] == found["samplesPerSecondByMode"]["data"]
    assert found["pricePerHour"] == 7.2


def test_the_update_takes_its_time_for_each_gib_of_parameters(tmp_path: Path) -> None:
    document = model(fast=(1, 10.0))
    without_s = answer(tmp_path, document, "--batch", "8")["stepSeconds"]
    document["devices"][0]["updateSecondsPerGib"] = 1000.0
    assert answer(tmp_path, document, "--batch", "8")["stepSeconds"] == pytest.approx(
        without_s + 1000.0 * 12 * 100 * MB / GIB
    )


def test_more_layouts_are_never_slower_and_ties_go_to_the_simplest(tmp_path: Path) -> None:
    """With slow links, the planner's choice among sharded members alone would be slower than whole models."""
    slow = {"defaultLink": {"gbitPerSecond": 10, "latencySeconds": 0.0001}, "leastMembers": 2}
    found = answer(tmp_path, model(fast=(2, 36.0), slow=(8, 14.0)) | slow, "--batch", "64")
    rates = found["samplesPerSecondByMode"]
    assert rates["data"] <= min(rates["sharded"], rates["pipeline"])
    assert max(rates.values()) <= found["samplesPerSecond"]
    free = answer(tmp_path, model(fast=(2, 10.0)), "--batch", "60")
    assert [member["kind"] for member in free["members"]] == ["Replicated"] * 2


def test_a_model_that_fits_no_device_is_divided(tmp_path: Path) -> None:
    """Units go by speed, three to one; memory allows it."""
    found = answer(tmp_path, model(fast=(1, 4.2), slow=(1, 4.2)), "--batch", "60", "--mode", "pipeline")
    (member,) = found["members"]
    assert member["kind"] == "Pipeline"
    stages = {stage["kind"]: stage["lastUnit"] - stage["firstUnit"] + 1 for stage in member["stages"]}
    assert stages == {"fast": 9, "slow": 3}
    assert all(stage["memoryBytes"] <= 4.2 * GIB for stage in member["stages"])
    assert found["samplesPerSecondByMode"]["data"] is None
    text = run(tmp_path, model(fast=(1, 4.2), slow=(1, 4.2)), "--batch", "60", "--mode", "pipeline").stdout
    assert "data does not fit" in text
    assert "fast: units" in text
    assert "one more fast brings +" in text


def test_a_device_that_is_thousands_of_times_as_slow_may_leave_no_bound(tmp_path: Path) -> None:
    """Then the line says nothing about the shortest step."""
    document = model(fast=(1, 4.2), slow=(1, 4.2))
    document["units"][0]["seconds"]["slow"] = measured(1000.0)
    found = answer(tmp_path, document, "--batch", "60")
    text = run(tmp_path, document, "--batch", "60").stdout
    assert found["provedLeastSeconds"] == 0
    assert "above the shortest step" not in text
    assert "of the rate of all devices" in text


def test_a_model_that_does_not_fit_at_all_says_what_would_help(tmp_path: Path) -> None:
    found = answer(tmp_path, model(fast=(1, 2.5)), "--batch", "60")
    assert found["feasible"] is False
    assert found["neededBytes"] == 12 * 400 * MB + 12 * 10 * MB
    assert "Add 1 device of kind fast." in found["reason"]
    assert found["oneMore"] == [{"kind": "fast", "samplesPerSecond": pytest.approx(2 / 0.36, rel=0.1)}]
    text = run(tmp_path, model(fast=(1, 2.5)), "--batch", "60").stdout
    assert text.startswith("not possible: the model needs 4.6 GiB")
    assert "one more fast makes it fit" in text


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        ({}, (), "the global batch is missing: add --batch N"),
        ({}, ("--batch", "60", "--cluster"), "--model stands alone, with --batch and --mode: remove the other options"),
        ({"microBatches": [8]}, ("--batch", "4"),
         "no micro-batch is as small as the batch of 4: add a smaller one to microBatches"),
        ({"devices": [{"name": "h100", "count": 1, "memoryGib": 80}]}, ("--batch", "60"),
         "unit 0 (blocks.0) was not measured on h100: measure it or leave the kind out"),
        ({"units": []}, ("--batch", "60"), "units has 0 entries, but needs at least 1"),
        ({"stateRatio": 0.5}, ("--batch", "60"), "stateRatio is 0.5, but must be at least 1"),
        ({"links": [{"between": ["fast", "moon"], "gbitPerSecond": 1}]}, ("--batch", "60"),
         "a link joins ('fast', 'moon'), which are not two of the device kinds"),
    ],
)  # fmt: skip
def test_mistakes_get_one_sentence(
    tmp_path: Path, change: dict[str, Any], arguments: tuple[str, ...], said: str
) -> None:
    result = run(tmp_path, model(fast=(1, 10.0)) | change, *arguments)
    assert result.exit_code == 2
    line = result.stderr.splitlines()[-1].removeprefix("Error: ").replace(f"{tmp_path}/model.yaml: ", "")
    assert line == said


def test_a_mode_belongs_to_a_model() -> None:
    result = CliRunner().invoke(main, ["forecast", "--mode", "pipeline"])
    assert result.exit_code == 2
    assert "--mode needs --model FILE" in result.stderr


@pytest.mark.parametrize("per_node", [2, 1])
def test_a_sharded_member_is_one_worker(tmp_path: Path, per_node: int) -> None:
    """No device holds the model. Two of a node do, and without common nodes only members of several workers."""
    document = model(fast=(4, 3.5)) | {"defaultLink": {"gbitPerSecond": 8000}}
    document["devices"][0]["perNode"] = per_node
    found = answer(tmp_path, document, "--batch", "8", "--mode", "sharded")
    rates = found["samplesPerSecondByMode"]
    assert rates["pipeline"] is not None
    assert rates["across-workers"] is not None
    if per_node == 1:
        assert rates["sharded"] is None
        assert not found["feasible"]
    else:
        assert [len(member["shards"]) for member in found["members"]] == [2, 2]


def test_members_of_several_workers_hold_state_by_memory(tmp_path: Path) -> None:
    """No device holds the model, and the slow one only a third of it; the fast one gets most samples."""
    document = model(fast=(1, 4.2), slow=(1, 2.0)) | {"defaultLink": {"gbitPerSecond": 8000}, "microBatches": [4]}
    document["units"][0]["activationBytes"] = MB
    found = answer(tmp_path, document, "--batch", "60", "--mode", "across-workers")
    (member,) = found["members"]
    assert member["kind"] == "Sharded"
    fast, slow = (next(each for each in member["shards"] if each["kind"] == kind) for kind in ("fast", "slow"))
    assert fast["stateRatio"] + slow["stateRatio"] == pytest.approx(1.0)
    assert fast["stateRatio"] > 2 / 3, "equal parts would not fit the slow device"
    assert fast["memoryBytes"] <= 4.2 * GIB
    assert slow["memoryBytes"] <= 2.0 * GIB
    assert (fast["shareSamples"], slow["shareSamples"]) == (3, 1), "a micro-batch by speed"
    rates = found["samplesPerSecondByMode"]
    assert rates["data"] is rates["sharded"] is None
    text = run(tmp_path, document, "--batch", "60", "--mode", "across-workers").stdout
    assert f"fast: {fast['stateRatio']:.0%}" in text
    best = answer(tmp_path, document, "--batch", "60")
    assert best["samplesPerSecond"] >= max(rates["across-workers"], rates["pipeline"])


def test_each_mode_can_be_asked_for() -> None:
    (option,) = (each for each in forecast.params if each.name == "mode")
    assert isinstance(option.type, click.Choice)
    assert set(option.type.choices) == set(MODES)
