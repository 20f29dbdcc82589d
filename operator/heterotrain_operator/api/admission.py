"""Checks a job as the API server does when it is applied, for jobs that are not applied yet.

The API server refuses by the CRD's structural schema: unknown fields, wrong types, missing and repeated entries. It
also refuses by validation rules. Here, the same schema is walked and the rules' twins in Python are evaluated. Unlike
``reading``, which accepts every object that an older API server may have stored, this accepts nothing that a new
object may not have. One table of jobs, checked here and against a real API server, keeps both equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from heterotrain_operator.api.explain import KINDS, explain, hint, remedy, shown
from heterotrain_operator.api.reading import SpecError, beyond_rules
from heterotrain_operator.api.schema import PRESERVE, broken_rules
from heterotrain_operator.api.v1alpha1 import NAME_RULE, HeteroTrainJobSpec

SCHEMA: Final = Path(__file__).with_name("spec_schema.json")
"""The CRD's schema of a spec without its texts, made by `make generate`: building it anew takes longer than a check."""
_FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")
_METADATA = (
    "name", "generateName", "namespace", "labels", "annotations", "finalizers", "ownerReferences", "uid",
    "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
    "managedFields", "selfLink",
)  # fmt: skip
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "object": (dict,), "array": (list,),
}  # fmt: skip
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_GENERATED = "xxxxx"
"""Stands for the five characters that the API server adds to ``generateName``."""


def read_new_job(body: Mapping[str, Any]) -> HeteroTrainJobSpec:
    """Return the spec of a job as the API server would admit it.

    Raises:
        SpecError: the API server would refuse the job; one sentence with the place and what to do.
    """
    if unknown := next((str(name) for name in body if name not in _FIELDS), ""):
        raise SpecError(f"{unknown} is not a field: {hint(unknown, _FIELDS)}")
    _check_metadata(body.get("metadata"))
    if body.get("spec") is None:
        raise SpecError("spec is missing")
    admitted = _admitted(body["spec"], _schema(), "spec")
    try:
        spec = HeteroTrainJobSpec.model_validate(admitted)
    except ValidationError as error:
        raise SpecError(explain(error, HeteroTrainJobSpec, prefix="spec")) from error
    if problem := next(broken_rules(spec, "spec", new=True), "") or beyond_rules(spec, body):
        raise SpecError(problem)
    return spec


def job_name(metadata: Mapping[str, Any]) -> str:
    """Return the name of a new job; one that the API server generates ends with ``xxxxx`` here."""
    name, prefix = metadata.get("name"), metadata.get("generateName")
    return str(name) if name else f"{prefix}{_GENERATED}" if prefix else ""


@cache
def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return found


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, Mapping) or not job_name(metadata):
        raise SpecError("metadata.name is missing")
    if unknown := next((str(name) for name in metadata if name not in _METADATA), ""):
        raise SpecError(f"metadata.{unknown} is not a field: {hint(unknown, _METADATA)}")
    for field in ("name", "generateName", "namespace"):
        if not isinstance(metadata.get(field, ""), str | None):
            raise SpecError(f"metadata.{field} must be text, not {shown(metadata[field])}")
    assert NAME_RULE.admits is not None  # noqa: S101  # stated with the rule
    if not NAME_RULE.admits(job_name(metadata)):
        raise SpecError(f"{NAME_RULE.message}; it is {shown(job_name(metadata))}")
    for kind in ("labels", "annotations"):
        entries = metadata.get(kind) or {}
        if not isinstance(entries, Mapping):
            raise SpecError(f"metadata.{kind} must be a mapping, not {shown(entries)}")
        for name, value in entries.items():
            if not isinstance(value, str):
                raise SpecError(f"metadata.{kind}.{name} must be text, not {shown(value)}{remedy('text', value, name)}")
            if kind == "labels" and not _LABEL_VALUE.fullmatch(value):
                raise SpecError(
                    f"metadata.labels.{name} is {shown(value)}, but must be at most 63 letters, digits, - _ ."
                )


def _admitted(value: Any, node: Mapping[str, Any], here: str) -> Any:
    """Return the value with nulls left out and 64.0 as 64, as the API server stores it.

    Raises:
        SpecError: the structural schema refuses a field's name, its type, or a repeated entry.
    """
    value = _typed(value, node, here)
    if isinstance(value, dict):
        fields, found = node.get("properties", {}), {}
        for name, child in value.items():
            known = fields.get(name) or node.get("additionalProperties")
            if known is not None and child is not None:
                found[name] = _admitted(child, known, f"{here}.{name}")
            elif known is None and node.get(PRESERVE):
                found[name] = child
            elif known is None:
                raise SpecError(f"{here}.{name} is not a field: {hint(str(name), fields)}")
        return found
    if isinstance(value, list):
        items = [_admitted(item, node["items"], f"{here}[{index}]") for index, item in enumerate(value)]
        _check_unique(items, node, here)
        return items
    return value


def _typed(value: Any, node: Mapping[str, Any], here: str) -> Any:
    either = node.get("x-kubernetes-int-or-string", False)
    kind = str(node.get("type", ""))
    if isinstance(value, float) and value.is_integer() and (either or kind == "integer"):
        value = int(value)
    allowed = (int, str) if either else _TYPES.get(kind, (object,))
    if not isinstance(value, allowed) or (isinstance(value, bool) and not {bool, object} & set(allowed)):
        name = "a whole number or text" if either else KINDS[kind]
        raise SpecError(f"{here} must be {name}, not {shown(value)}{remedy(name, value, here)}")
    choices = node.get("enum")
    if choices and value not in choices:
        raise SpecError(f"{here} is {shown(value)}, but must be one of {', '.join(choices)}")
    if node.get("format") == "date-time" and not _TIME.fullmatch(str(value)):
        raise SpecError(f"{here} must be {KINDS['datetime']}, not {shown(value)}")
    return value


def _check_unique(items: list[Any], node: Mapping[str, Any], here: str) -> None:
    if node.get("x-kubernetes-list-type") != "map":
        return
    seen = set()
    for item in items:
        key = tuple(item.get(name) for name in node["x-kubernetes-list-map-keys"])
        if key in seen:
            raise SpecError(f"{here} names {shown(key[0])} twice: give every entry its own name")
        seen.add(key)
