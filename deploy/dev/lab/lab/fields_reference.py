"""``docs/fields.md``: every field of a HeteroTrainJob, from the CRD. ``make chart-files`` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from lab.cluster import REPOSITORY

PATH: Final = REPOSITORY / "docs/fields.md"
CRD: Final = REPOSITORY / "crds/heterotrain.dev_heterotrainjobs.yaml"
AS_IN_KUBERNETES: Final = ("template", "tolerations", "resources")
"""Fields whose inside readers know."""
_ABOUT = """# Fields of a HeteroTrainJob

Generated from the CRD by `make chart-files`. `kubectl explain htj.spec --recursive` shows the same. []: in each item of
a list; .*: under each name. A field in bold is required where its parent is given. [api.md](api.md) has the
conventions, and [operations.md](operations.md) the conditions. `template`, `tolerations` and `resources`
are as in a PodTemplateSpec of Kubernetes. `kubectl explain htj.spec.template.spec` has what the operator adds to a
template, and what it refuses.
"""
_HEAD = """
## {title}

| field | type | default | meaning |
| --- | --- | --- | --- |
"""


def text() -> str:
    """Return the document."""
    (version,) = yaml.safe_load(CRD.read_text(encoding="utf-8"))["spec"]["versions"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]
    parts = [_ABOUT]
    for name in ("spec", "status"):
        parts += [_HEAD.format(title=name), *(f"{row}\n" for row in _rows(name, fields[name]))]
    return "".join(parts)


def _rows(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        own = f"{path}.{name}"
        shown = f"**`{own}`**" if name in required else f"`{own}`"
        default = f"`{json.dumps(field['default'])}`" if _is_plain(field.get("default")) else ""
        yield f"| {shown} | {_type(field)} | {default} | {field.get('description', '').replace('|', chr(92) + '|')} |"
        if name not in AS_IN_KUBERNETES:
            yield from _below(own, field)


def _below(path: str, field: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of the fields inside of a field."""
    yield from _rows(path, field)
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(field.get(key), dict):
            yield from _below(path + mark, field[key])


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _type(field: Mapping[str, Any]) -> str:
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field['items'])}{_limits(field, 'minItems', 'maxItems')}"
    if kind == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"map of {_type(field['additionalProperties'])}"
    if kind == "string":
        return f"{field.get('format', kind)}{_limits(field, 'minLength', 'maxLength')}"
    return kind + _limits(field, "minimum", "maximum")


def _limits(field: Mapping[str, Any], least: str, most: str) -> str:
    low, high = field.get(least), field.get(most)
    if low is None and high is None:
        return ""
    what = {"minItems": " items", "minLength": " characters"}.get(least, "")
    if high is None:
        return f", at least {low}{what}"
    return f", at most {high}{what}" if low is None else f", {low} to {high}{what}"
