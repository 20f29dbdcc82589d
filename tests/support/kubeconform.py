"""kubeconform with the schemas of the API server that the tests run against, not those of a public list.

The API server publishes the schema of every kind, also of custom resources, as OpenAPI. kubeconform wants one JSON
schema for each kind. Unlike the API server's own, these schemas refuse unknown fields.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from support.programs import program

_COMPONENTS, _DEFINITIONS = "#/components/schemas/", "#/definitions/"
_FILE = "{{.Group}}_{{.ResourceAPIVersion}}_{{.ResourceKind}}.json"


def kubeconform(text: str, schemas: Path) -> dict[str, Any]:
    """Return kubeconform's report about a stream of YAML documents: ``resources`` and ``summary``."""
    found = program("kubeconform")
    assert found is not None
    options = ["-strict", "-summary", "-verbose", "-output", "json", "-schema-location", str(schemas / _FILE)]
    done = subprocess.run([found, *options, "-"], input=text, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) == (report["summary"]["invalid"] + report["summary"]["errors"] == 0)
    return report


def write_schemas(raw: Callable[[str], Any], folder: Path, kinds: Iterable[tuple[str, str]]) -> None:
    """Write the schema of each kind.

    Args:
        raw: returns the JSON document at a path of the API server.
        folder: of the schemas.
        kinds: pairs of API version and kind, such as ``("apps/v1", "Deployment")``.
    """
    wanted = set(kinds)
    served = raw("/openapi/v3")["paths"]
    for api_version in {each for each, _ in wanted}:
        path = f"apis/{api_version}" if "/" in api_version else f"api/{api_version}"
        published = raw(served[path]["serverRelativeURL"])["components"]["schemas"]
        definitions = {name: _strict(schema) for name, schema in published.items()}
        for name, schema in published.items():
            for known in schema.get("x-kubernetes-group-version-kind", ()):
                of_kind = "/".join(filter(None, (known["group"], known["version"])))
                if (of_kind, known["kind"]) in wanted and of_kind == api_version:
                    document = {"$ref": _DEFINITIONS + name, "definitions": definitions}
                    (folder / _file_name(of_kind, known["kind"])).write_text(json.dumps(document))


def _file_name(api_version: str, kind: str) -> str:
    """Return the name that kubeconform derives; the group of the core's kinds is their version there."""
    return f"{api_version.partition('/')[0]}_{api_version.rpartition('/')[2]}_{kind.lower()}.json"


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with references to ``definitions``, and without room for fields that it does not name."""
    strict = dict(schema)
    if isinstance(reference := strict.get("$ref"), str):
        strict["$ref"] = reference.replace(_COMPONENTS, _DEFINITIONS)
    for name in ("allOf", "anyOf", "oneOf"):  # parts of a schema: what one does not name, another may
        if name in strict:
            strict[name] = [_strict(part) if "$ref" in part else part for part in strict[name]]
    for name in ("items", "additionalProperties"):
        if isinstance(strict.get(name), dict):
            strict[name] = _strict(strict[name])
    if "properties" in strict:
        strict["properties"] = {name: _strict(value) for name, value in strict["properties"].items()}
        if not strict.get("x-kubernetes-preserve-unknown-fields"):
            strict.setdefault("additionalProperties", False)
    return strict
