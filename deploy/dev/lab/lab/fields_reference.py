"""``docs/fields.md``: every field of a HeteroTrainJob, from the CRD. ``make generate`` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from lab.cluster import REPOSITORY

PATH: Final = REPOSITORY / "docs/fields.md"
CRD: Final = REPOSITORY / "crds/heterotrain.dev_heterotrainjobs.yaml"
AS_IN_KUBERNETES: Final = ("template", "tolerations", "resources", "onExitCodes", "onPodConditions", "conditions")
"""Fields whose inside readers know."""
_ABOUT = """# Fields of a HeteroTrainJob

Generated from the CRD by `make generate`. `kubectl explain htj.spec --recursive` shows the same. A section for each
object; `[]` stands for each item of a list, `.*` for each name. [api.md](api.md) has the conventions, and
[operations.md](operations.md) the conditions. As in Kubernetes are `template`, `tolerations` and `resources` (of a
PodTemplateSpec), `onExitCodes` and `onPodConditions` (of a Job's podFailurePolicy) and `conditions` (metav1.Condition).
`kubectl explain htj.spec.template.spec` has what the operator adds to a template, and what it refuses.
"""
_MARKS: Final = (("items", "[]"), ("additionalProperties", ".*"))


def text() -> str:
    """Return the document."""
    (version,) = yaml.safe_load(CRD.read_text(encoding="utf-8"))["spec"]["versions"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]
    return _ABOUT + "".join(part for name in ("spec", "status") for part in _section(name, fields[name]))


def _section(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of an object, and then those of the objects inside."""
    if "properties" in schema:
        level = "##" if "." not in path else "###"
        yield f"\n{level} {path}\n\n" + "".join(_items(path, schema))
    for name, field in schema.get("properties", {}).items():
        if name not in AS_IN_KUBERNETES:
            yield from _inside(f"{path}.{name}", field)


def _inside(path: str, field: Mapping[str, Any]) -> Iterator[str]:
    yield from _section(path, field)
    for key, mark in _MARKS:
        if isinstance(field.get(key), dict):
            yield from _inside(path + mark, field[key])


def _items(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield an entry for each field: anchor, name, type, default, meaning."""
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        facts = [_type(field), *(["required"] if name in required else [])]
        facts += [f"default `{json.dumps(field['default'])}`"] if _is_plain(field.get("default")) else []
        inside = "" if name in AS_IN_KUBERNETES else _target(f"{path}.{name}", field)
        more = f" Fields: [{inside}](#{re.sub('[^a-z]', '', inside.lower())})." if inside else ""
        anchor = f'<a id="{path}.{name}"></a>' if path.startswith("spec") else ""
        yield f"- {anchor}`{name}` ({'; '.join(facts)}): {field.get('description', '')}{more}\n"


def _target(path: str, field: Mapping[str, Any]) -> str:
    """Return the path of the object inside a field, which has a section of its own; empty without one."""
    if "properties" in field:
        return path
    return next((_target(path + mark, field[key]) for key, mark in _MARKS if isinstance(field.get(key), dict)), "")


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
