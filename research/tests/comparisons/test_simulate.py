"""``python -m heterotrain_simulate``: scenario files, figures of the engine, output files labelled as simulated."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from heterotrain_simulate import command
from heterotrain_simulate.scenario_file import POLICIES, read_scenario, scenario_of, shipped
from heterotrain_simulator.baselines import Even
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.spot_traces import P3
from support.cli_runner import CliRunner

SMALL: dict[str, Any] = {
    "workload": "opt-350m",
    "batch": 64,
    "pools": [
        {"name": "fast", "gpu": "a100-40", "count": 1},
        {"name": "slow", "gpu": "v100", "count": 2, "pricePerHour": 1.5},
    ],
    "network": {"gigabitsPerSecond": 100},
    "policies": ["even", "heterotrain"],
    "end": {"epochs": 3},
}


def run(folder: Path, document: Any, *more: str) -> Result:
    """Simulate a document."""
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return CliRunner().invoke(command.simulate, [str(path), *more], catch_exceptions=False)


def refusal(folder: Path, **changes: Any) -> str:
    """Return the one line that refuses the small scenario with changes."""
    result = run(folder, {**SMALL, **changes})
    assert result.exit_code == 2, result.output
    return result.stderr.rstrip("\n").removeprefix("Error: ").removeprefix(f"{folder}/scenario.yaml: ")


def test_figures_are_the_engine_s(tmp_path: Path) -> None:
    """The JSON output equals the engine's result for the same scenario and seed."""
    result = run(tmp_path, SMALL, "-o", "json", "--seed", "7")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["simulated"] is True
    assert found["seeds"] == [7]
    assert [policy["policy"] for policy in found["policies"]] == ["even", "heterotrain"]
    outcome = simulate(scenario_of(SMALL, name="x", where="x").scenario, Even(), seed=7)
    assert found["policies"][0]["endSeconds"] == pytest.approx(outcome.end_s)
    assert found["policies"][0]["cost"] == pytest.approx(outcome.cost)
    assert found["policies"][1]["samplesPerSecond"] > 1.3 * found["policies"][0]["samplesPerSecond"]


def test_the_table_says_that_it_is_simulated(tmp_path: Path) -> None:
    """Its title has cluster, workload, batch and target."""
    text = run(tmp_path, SMALL).stdout
    assert text.startswith(
        "simulated: OPT-350M at sequence 2048 on 1 a100-40 + 2 v100, batch 64; "
        "target ten passes over 20,480 sequences\n"
    )
    assert [line.split()[0] for line in text.splitlines() if line.split()[:1] in (["even"], ["heterotrain"])] == [
        "even",
        "heterotrain",
    ]
    headings = text.splitlines()[2].split()
    explained = [part.split(":")[0] for part in text.splitlines()[-1].split("; ")]
    assert explained == ["faster", "efficiency", "off"]
    assert set(explained) < set(headings)
    assert "effective" not in headings
    rates = [
        line.split()[headings.index("samples/s") + 2] for line in text.splitlines() if line.startswith(" heterotrain")
    ]
    assert len(rates[0].replace(".", "").lstrip("0")) >= 3, "a rate has three digits"


def test_files(tmp_path: Path) -> None:
    """Table, figures, periods and pictures are written; the periods add up to the run."""
    out = tmp_path / "out"
    assert run(tmp_path, {**SMALL, "seeds": [1, 2]}, "--out", str(out)).exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "cost.png",
        "periods.csv",
        "progress.png",
        "shares.png",
        "summary.json",
        "summary.md",
    ]
    assert (out / "summary.md").read_text(encoding="utf-8").startswith("simulated: ")
    rows = list(csv.DictReader(io.StringIO((out / "periods.csv").read_text(encoding="utf-8"))))
    assert {(row["policy"], row["seed"]) for row in rows} == {
        (p, s) for p in ("even", "heterotrain") for s in ("1", "2")
    }
    assert sum(int(row["steps"]) for row in rows if row["policy"] == "even" and row["seed"] == "1") == 960
    assert {int(row["samples_fast"]) + int(row["samples_slow"]) for row in rows} == {64}
    for name in ("cost.png", "progress.png", "shares.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_options_choose_policies_and_seeds(tmp_path: Path) -> None:
    """They take precedence over the file."""
    found = json.loads(
        run(tmp_path, SMALL, "-o", "json", "--policy", "proportional", "--seed", "3", "--seed", "3").stdout
    )
    assert found["seeds"] == [3]
    assert [policy["policy"] for policy in found["policies"]] == ["proportional"]


def test_every_shipped_scenario_is_valid_and_listed() -> None:
    """Each has a description and can be read."""
    assert {"mixed", "adaptive", "noisy", "spot", "throttle"} <= set(shipped())
    listed = CliRunner().invoke(command.simulate, ["--list"]).stdout
    for name, what in shipped().items():
        assert what
        assert name in listed
        assert read_scenario(name).scenario.name == name


def test_the_printed_schema_has_the_defaults() -> None:
    """A scenario that states every printed default is the same as one without them."""
    schema = json.loads(CliRunner().invoke(command.simulate, ["--schema"]).stdout)
    bare = {"workload": "bert", "batch": 64, "pools": [{"name": "x", "gpu": "t4"}]}
    stated = {name: field["default"] for name, field in schema["properties"].items() if "default" in field}
    assert {"network", "gamma", "noise", "pauses", "end", "policies", "seeds"} <= set(stated)
    assert stated["noise"]["variation"] == 0.03
    full = {**{name: value for name, value in stated.items() if value is not None}, **bare}
    full["pauses"].pop("restartSeconds")
    assert scenario_of(full, name="x", where="x") == scenario_of(bare, name="x", where="x")
    assert scenario_of(bare, name="x", where="x").policies == tuple(POLICIES)


def test_a_trace_is_a_pool_s_workers() -> None:
    """Nodes of the trace are the pool's workers; the pool starts empty."""
    document = {
        "workload": "bert",
        "batch": 64,
        "pools": [{"name": "x", "gpu": "v100", "trace": "p3"}],
        "end": {"seconds": 60},
    }
    scenario = scenario_of(document, name="x", where="x").scenario
    assert scenario.groups[0].count == 0
    assert len(scenario.changes) == len(P3.minutes)
    assert {change.pool for change in scenario.changes} == {"x"}


def test_wrong_scenarios_are_one_sentence(tmp_path: Path) -> None:
    """Each has the place and the expected value."""
    assert refusal(tmp_path, batch=0) == "batch is 0, but must be at least 1"
    assert refusal(tmp_path, workload="gpt").startswith("workload is \"gpt\", but must be one of 'cifar10', 'imagenet'")
    assert refusal(tmp_path, polices=[]) == "polices is not a field: did you mean policies?"
    assert refusal(tmp_path, pools=[{"name": "x", "gpu": "k80"}]).startswith(
        "opt-350m was not measured on k80, only on gh200"
    )
    assert (
        refusal(tmp_path, adaptive=True) == "no noise scale was published for opt-350m, so its batch cannot be adaptive"
    )
    assert (
        refusal(tmp_path, changes=[{"pool": "y", "atSeconds": 1}])
        == "a change names the pool y, which is not one of fast, slow"
    )
    assert (
        refusal(tmp_path, network={"gigabitsPerSecond": 0}) == "network.gigabitsPerSecond is 0, but must be more than 0"
    )
    missing = CliRunner().invoke(command.simulate, ["/nowhere.yaml"])
    assert missing.exit_code == 2
    assert missing.stderr == (
        "Error: /nowhere.yaml: is neither a file nor a shipped scenario: "
        "these are adaptive, mixed, noisy, spot, throttle\n"
    )
    assert refusal(tmp_path, batch=2) == (
        "the global batch of 2 is less than one sample for each of the 3 workers at the start: raise it"
    )


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the simulation."""
    monkeypatch.setattr(command, "run_all", lambda *_: pytest.fail("simulated first"))
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    result = run(tmp_path, SMALL, "--out", str(blocked / "below"))
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
