"""Profiles in YAML and JSON; each mistake is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from heterotrain_cli.documents import parse_document
from heterotrain_cli.main import main
from heterotrain_cli.profile import Profile
from support.cli_runner import CliRunner

ONE = {"name": "x", "perSampleSeconds": 0.1}

ONE_KIND_OF_TIME = (
    "members[0]: give either measured, or at least one of perSampleSeconds, fixedSeconds, backwardPerSampleSeconds and "
    "backwardFixedSeconds, not both"
)


def run(text: str, *more: str, batch: int = 8) -> Result:
    """Forecast with the text on standard input."""
    arguments = ["forecast", "--profile", "-", "--batch", str(batch), *more]
    return CliRunner().invoke(main, arguments, input=text, catch_exceptions=False)


def the_error(document: Any) -> str:
    """Return the one line that refuses the document."""
    result = run(document if isinstance(document, str) else json.dumps(document))
    assert result.exit_code == 2
    assert result.stdout == ""
    line = result.stderr.removeprefix("Error: standard input: ")
    assert line.count("\n") == 1, "one sentence on one line"
    return line.rstrip("\n")


BAD: list[tuple[Any, str]] = [
    ({}, "members is missing"),
    ([], "the document must be a mapping, not a list"),
    ("", "the document must be a mapping, not null"),
    ({"members": []}, "members has 0 entries, but needs at least 1"),
    ({"members": [{"perSampleSeconds": 1}]}, "members[0].name is missing"),
    ({"members": [{"name": 3, "perSampleSeconds": 1}]}, 'members[0].name must be text, not 3: put it in quotes, "3"'),
    (
        {"members": [ONE, {"name": "x", "perSampelSeconds": 1}]},
        "members[1].perSampelSeconds is not a field: did you mean perSampleSeconds?",
    ),
    (
        {"members": [{"name": "x"}]},
        ONE_KIND_OF_TIME,
    ),
    (
        {"members": [{**ONE, "measured": [[1, 1]]}]},
        ONE_KIND_OF_TIME,
    ),
    (
        {"members": [{"name": "x", "fixedSeconds": 0}]},
        "members[0]: a step takes no time: set at least one coefficient above 0",
    ),
    ({"members": [{"name": "x", "perSampleSeconds": -1}]}, "members[0].perSampleSeconds is -1, but must be at least 0"),
    (
        {"members": [{"name": "x", "perSampleSeconds": "1"}]},
        'members[0].perSampleSeconds must be a number, not "1": remove the quotes, 1',
    ),
    ({"members": [{"name": "x", "perSampleSeconds": True}]}, "members[0].perSampleSeconds must be a number, not true"),
    ({"members": [{**ONE, "count": 0}]}, "members[0].count is 0, but must be at least 1"),
    ({"members": [{**ONE, "count": 1.5}]}, "members[0].count must be a whole number, not 1.5"),
    (
        {"members": [{**ONE, "count": 60_000}, {**ONE, "count": 60_000}]},
        "the counts add up to 120000 members, but at most 100000 are possible",
    ),
    ({"members": [{**ONE, "granularity": 0}]}, "members[0].granularity is 0, but must be at least 1"),
    ({"members": [{"name": "x", "measured": []}]}, "members[0].measured has 0 entries, but needs at least 1"),
    ({"members": [{"name": "x", "measured": [[1]]}]}, "members[0].measured[0][1] is missing"),
    (
        {"members": [{"name": "x", "measured": [[1, 2, 3]]}]},
        "members[0].measured[0] has more than 2 entries: remove some",
    ),
    (
        {"members": [{"name": "x", "measured": [[1, 2], [1, 3]]}]},
        "members[0]: measured gives 1 samples twice: keep one of the two times",
    ),
    (
        {"members": [{"name": "x", "measured": [[0, 0], [1, 0]]}]},
        "members[0]: measured gives 0 seconds for 1 samples: a share with samples takes time",
    ),
    ({"members": [ONE], "communication": {"gamma": 1.5}}, "communication.gamma is 1.5, but must be at most 1"),
    ('{"members": [{"name": "x", "perSampleSeconds": NaN}]}', "members[0].perSampleSeconds must be a finite number"),
    ('{"members": [{"name": "x", "perSampleSeconds": 1e999}]}', "members[0].perSampleSeconds must be a finite number"),
    ('{"members": [], "members": []}', "the key members appears twice: keep one"),
    (
        "members: [",
        "is neither YAML nor JSON: correct line 1, column 11 (expected the node content, but found '<stream end>')",
    ),
    (
        "members: []\nmembers: []\n",
        "the key members appears twice: keep one (line 2)",
    ),
]


@pytest.mark.parametrize(("document", "sentence"), BAD, ids=[sentence[:60] for _, sentence in BAD])
def test_wrong_input_is_one_sentence(document: Any, sentence: str) -> None:
    """Exit status 2, nothing on stdout, one line on stderr."""
    assert the_error(document) == sentence


def test_missing_file() -> None:
    """The message has the path."""
    result = CliRunner().invoke(main, ["forecast", "--profile", "/nowhere/p.yaml", "--batch", "1"])
    assert result.exit_code == 2
    assert "/nowhere/p.yaml: there is no such file: check the path" in result.stderr


def test_options_that_are_missing_or_out_of_range() -> None:
    """The message has the missing option."""
    assert "--batch N" in CliRunner().invoke(main, ["forecast", "--profile", "-"], input=json.dumps({})).stderr
    assert CliRunner().invoke(main, ["forecast", "--profile", "-"], input="{}").exit_code == 2
    assert CliRunner().invoke(main, ["forecast", "--batch", "3"]).exit_code == 2
    assert run(json.dumps({"members": [ONE]}), batch=0).exit_code == 2


def test_yaml_and_json_are_equivalent() -> None:
    """The same profile in YAML, in flow YAML and in JSON gives the same answer; 1e-3 is a number in all of them."""
    texts = [
        "members:\n- name: x\n  perSampleSeconds: 1e-3\n  fixedSeconds: .5\n",
        "{members: [{name: x, perSampleSeconds: 1e-3, fixedSeconds: 0.5}]}",
        '{"members": [{"name": "x", "perSampleSeconds": 1e-3, "fixedSeconds": 0.5}]}',
    ]
    answers = {run(text, "-o", "json").stdout for text in texts}
    assert len(answers) == 1
    assert json.loads(answers.pop())["stepSeconds"] == pytest.approx(0.508)


def test_numbers_of_yaml_1_2() -> None:
    """A leading zero is decimal, an exponent needs no point, and a date stays text."""
    found = parse_document("[010, 1e3, +5, -.5, 2026-01-01, 1:30, yes_]", where="here")
    assert found == [10, 1000.0, 5, -0.5, "2026-01-01", "1:30", "yes_"]


def test_unsorted_tables_are_sorted() -> None:
    """The order of measured points does not matter."""
    there = {"members": [{"name": "x", "measured": [[1, 1.0], [4, 2.0], [9, 3.0]]}]}
    back = {"members": [{"name": "x", "measured": [[9, 3.0], [1, 1.0], [4, 2.0]]}]}
    assert run(json.dumps(there), "-o", "json").stdout == run(json.dumps(back), "-o", "json").stdout


def test_an_impossible_batch_is_an_answer() -> None:
    """Status 0, feasible false, and a reason with the limit."""
    document = {"members": [{"name": "small", "perSampleSeconds": 1, "maxSamples": 3}]}
    result = run(json.dumps(document), "-o", "json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["feasible"] is False
    assert "above 3, the sum of the largest shares" in answer["reason"]
    table = run(json.dumps(document))
    assert table.exit_code == 0
    assert table.stdout.startswith("not possible: ")


def test_the_reason_names_an_impossible_member() -> None:
    """By its name in the profile and its number."""
    document = {"members": [ONE, {"name": "odd", "perSampleSeconds": 1, "minSamples": 5, "maxSamples": 3}]}
    assert json.loads(run(json.dumps(document), "-o", "json").stdout)["reason"].startswith(
        "member odd (number 2) needs"
    )


def test_the_table() -> None:
    """One row for each entry, and the price if there is one."""
    document = {
        "members": [
            {"name": "x", "perSampleSeconds": 0.1, "count": 2, "pricePerHour": 1.5},
            {"name": "y", "perSampleSeconds": 0.2, "pricePerHour": 1},
        ]
    }
    text = run(json.dumps(document), batch=10).stdout
    assert "10 samples a step: 0.4 s, 25 samples/s, efficiency 1.000 of the sum of solo rates" in text
    assert "4.00 an hour, 44.44 for a million samples" in text
    row = next(line for line in text.splitlines() if "x" in line.split())
    assert row.split() == ["x", "2", "4", "1", "Compute"]


def test_the_schema_is_printed() -> None:
    """Every field in it has a description, its own or that of its type."""
    printed = CliRunner().invoke(main, ["forecast", "--schema"])
    assert printed.exit_code == 0
    schema = json.loads(printed.stdout)
    assert schema["required"] == ["members"]
    fields = {**schema["properties"], **schema["$defs"]["ProfileMember"]["properties"]}
    assert [name for name, field in fields.items() if not {"description", "$ref"} & set(field)] == []
    assert all("description" in part for part in schema["$defs"].values())


DOCUMENT = Path(__file__).parents[3] / "docs" / "forecast.md"


def test_the_documented_example_gives_the_documented_answer() -> None:
    """The profile in docs/forecast.md gives the output there."""
    text = DOCUMENT.read_text(encoding="utf-8")
    profile = text.split("```yaml\n")[1].split("```")[0]
    shown = text.split("$ heterotrain forecast --profile gpus.yaml --batch 512\n")[1].split("```")[0]
    printed = run(profile, batch=512).stdout
    assert [line.strip() for line in printed.splitlines() if line.strip()] == [
        line.strip() for line in shown.splitlines() if line.strip()
    ]


def test_documented_fields_are_the_schema_s() -> None:
    """docs/forecast.md has every field of the schema."""
    text = DOCUMENT.read_text(encoding="utf-8")
    parts = Profile.model_json_schema()["$defs"].values()
    names = [name for part in parts for name in part["properties"]]
    assert [name for name in names if f"`{name}`" not in text] == []
