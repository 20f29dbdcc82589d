"""The generated CRD: in the repository as the models make it, and complete enough for ``kubectl explain``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_operator.api.conditions import ConditionType
from heterotrain_operator.api.crd import crd

ROOT = Path(__file__).parents[2]
NAME = "heterotrain.dev_heterotrainjobs.yaml"


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field, f"{path}.{name}")
        if isinstance(field.get("items"), dict):
            yield from fields(field["items"], f"{path}.{name}[]")


def schema_of(part: str) -> dict[str, Any]:
    found: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][part]
    return found


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_field_has_a_description(part: str) -> None:
    missing = [path for path, field in fields(schema_of(part)) if not field.get("description")]
    assert missing == []


def leaves(part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fields that hold a value, a list of values or a map of values."""
    for path, field in fields(schema_of(part)):
        if "properties" not in field and "properties" not in field.get("items", {}):
            yield path, field


def test_every_value_of_the_spec_has_an_example() -> None:
    """Unless its choices speak for themselves, or it must be left out."""

    def speaks(field: dict[str, Any]) -> bool:
        text = field["description"]
        return "Example: " in text or "enum" in field or field["type"] == "boolean" or "Leave it out" in text

    found = dict(leaves("spec"))
    assert len(found) > 50
    assert [path for path, field in found.items() if not speaks(field)] == []


def test_no_value_of_the_spec_is_a_float() -> None:
    assert [path for path, field in leaves("spec") if field.get("type") == "number"] == []


def test_durations_of_the_spec_are_whole_seconds() -> None:
    units = ("minutes", "hours", "days", "milliseconds", "duration")
    assert [path for path, _ in fields(schema_of("spec")) if path.lower().endswith(units)] == []


@pytest.mark.parametrize("part", ["spec", "status"])
def test_choices_are_camel_case(part: str) -> None:
    free = {".managedBy"}  # names of controllers, as in Kubernetes' Job
    choices = {path: field["enum"] for path, field in fields(schema_of(part)) if "enum" in field and path not in free}
    assert choices
    assert {
        path: words for path, words in choices.items() if not all(w.isalnum() and w[0].isupper() for w in words)
    } == {}


MOST_WORDS = 30


def texts(node: Any) -> Iterator[str]:
    """Yield all descriptions and messages of rules."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name in ("description", "message") and isinstance(value, str):
                yield value
            else:
                yield from texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from texts(value)


def test_sentences_are_short() -> None:
    sentences = [each for text in texts(crd()) for each in re.split(r"(?<=\.) ", text)]
    assert len(sentences) > 200
    assert [each for each in sentences if len(each.split()) > MOST_WORDS] == []


def test_the_scale_subresource_points_at_fields_that_exist() -> None:
    scale = crd()["spec"]["versions"][0]["subresources"]["scale"]
    known = {f".spec{path}" for path, _ in fields(schema_of("spec"))} | {
        f".status{path}" for path, _ in fields(schema_of("status"))
    }
    assert set(scale) == {"specReplicasPath", "statusReplicasPath", "labelSelectorPath"}
    assert set(scale.values()) <= known


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_list_map_and_text_is_bounded_so_that_rules_stay_cheap_and_the_status_small(part: str) -> None:
    def unbounded(field: dict[str, Any]) -> bool:
        match field.get("type"):
            case "array":
                return "maxItems" not in field
            case "object":
                return "additionalProperties" in field and "maxProperties" not in field
            case "string":
                return not {"maxLength", "enum", "format"} & set(field)
            case _:
                return False

    assert [path for path, field in fields(schema_of(part)) if unbounded(field)] == []


def test_printer_columns_point_at_fields_of_the_status() -> None:
    status = dict(fields(schema_of("status")))
    columns = crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    paths = [
        column["jsonPath"].removeprefix(".status") for column in columns if column["jsonPath"].startswith(".status")
    ]
    assert [path for path in paths if path not in status] == []
    assert 5 < len(paths) <= 7, "a table of jobs fits a terminal"


@pytest.mark.parametrize(
    "example", sorted((ROOT / "deploy/examples").glob("*/job*.yaml")), ids=lambda p: f"{p.parent.name} {p.stem}"
)
def test_the_example_jobs_use_only_fields_that_exist(example: Path) -> None:
    spec = yaml.safe_load(example.read_text())["spec"]
    known = {path for path, _ in fields(schema_of("spec"))}

    def paths(value: Any, path: str) -> Iterator[str]:
        if path in (".template.spec.containers[]", ".template.spec.volumes[]", ".template.metadata"):
            return
        if isinstance(value, dict):
            for name, inner in value.items():
                yield f"{path}.{name}"
                free = path.endswith((".nodeSelector", ".limits", ".requests")) or path == ".template.spec"
                if not free:
                    yield from paths(inner, f"{path}.{name}")
        elif isinstance(value, list):
            for inner in value:
                yield from paths(inner, f"{path}[]")

    free = (".nodeSelector.", ".limits.", ".requests.", ".template.spec.")
    used = {path for path in paths(spec, "") if not any(part in path for part in free)}
    assert used - known == set()


def test_the_documentation_names_every_condition() -> None:
    text = (ROOT / "docs/api.md").read_text()
    assert [kind.value for kind in ConditionType if f"`{kind.value}`" not in text] == []
