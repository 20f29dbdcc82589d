"""The generated CRD: in the repository as the models make it, and complete enough for ``kubectl explain``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_operator.api.crd import crd, rendered

ROOT = Path(__file__).parents[2]
NAME = "heterotrain.dev_heterotrainjobs.yaml"


@pytest.mark.parametrize("folder", ["crds", "helm/heterotrain/files"])
def test_the_file_is_what_the_models_make(folder: str) -> None:
    assert (ROOT / folder / NAME).read_text() == rendered(), "run `make crds`"


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
    assert len(paths) > 5


@pytest.mark.parametrize("example", sorted((ROOT / "deploy/examples").glob("*/job.yaml")), ids=lambda p: p.parent.name)
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
