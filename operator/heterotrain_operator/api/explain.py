"""One sentence for each mistake in a document: its place, the value, and what is allowed there."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from heterotrain_core.uris import redacted
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_MOST_SHOWN = 60
"""Characters of a wrong value in a message, so that the message fits on a line."""

KINDS = {
    "object": "a mapping", "array": "a list", "integer": "a whole number", "number": "a number",
    "boolean": "true or false",
    "model": "a mapping", "dict": "a mapping", "list": "a list", "tuple": "a list", "string": "text",
    "int": "a whole number", "float": "a number", "bool": "true or false",
    "datetime": "a time such as 2027-01-31T18:00:00Z",
}  # fmt: skip
_SENTENCES = {
    "missing": "{here} is missing",
    "greater_than_equal": "{here} is {value}, but must be at least {ge}",
    "greater_than": "{here} is {value}, but must be more than {gt}",
    "less_than_equal": "{here} is {value}, but must be at most {le}",
    "less_than": "{here} is {value}, but must be less than {lt}",
    "too_short": "{here} has {actual_length} entries, but needs at least {min_length}",
    "too_long": "{here} has more than {max_length} entries: remove some",
    "string_too_short": "{here} is empty",
    "string_too_long": "{here} is longer than {max_length} characters",
    "string_pattern_mismatch": "{here} is {value}, but must be {form}",
    "finite_number": "{here} must be a finite number",
    "literal_error": "{here} is {value}, but must be one of {expected}",
    "enum": "{here} is {value}, but must be one of {expected}",
    "int_from_float": "{here} must be a whole number, not {value}",
    "value_error": "{here}: {error}",
}
_DURATION = re.compile(r"([0-9]{1,9}) ?(s|m|min|h|d)")
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_FORMS = {
    "^[a-z][a-z0-9+.-]*://.+$": "a URI such as file:///checkpoints",
    r"^[0-9]+(\.[0-9]+)?$": 'a number such as "3.67", without a currency',
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": "lower-case letters, digits and hyphens",
}


def explain(error: ValidationError, model: type[BaseModel], *, prefix: str = "") -> str:
    """Return one sentence about the first mistake; a misspelt field comes first, as it explains a missing one."""
    first = min(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
    parts = [prefix, *first["loc"]] if prefix else first["loc"]
    here = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    if first["type"] == "extra_forbidden":
        return f"{here} is not a field: {hint(str(first['loc'][-1]), _known_fields(model, first['loc'][:-1]))}"
    return _sentence(first, here or "the document").removeprefix("the document: ")


def _sentence(details: ErrorDetails, here: str) -> str:
    value = details["input"]
    limits = {key: f"{limit:g}" if isinstance(limit, float) else limit for key, limit in details.get("ctx", {}).items()}
    form = _FORMS.get(str(limits.get("pattern")), f"of the form {limits.get('pattern')}")
    if sentence := _SENTENCES.get(details["type"]):
        return sentence.format(here=here, value=shown(value), form=form, **limits)
    kind = next((kind for name, kind in KINDS.items() if details["type"].startswith(f"{name}_")), None)
    if kind is None:
        return f"{here}: {details['msg']}"
    return f"{here} must be {kind}, not {shown(value)}{remedy(kind, value, here)}"


def remedy(kind: str, value: Any, here: str) -> str:
    """Return the remedy for text in place of a number, or a number in place of text; empty without one.

    Args:
        kind: of ``KINDS``, what the value must be.
        value: what it is.
        here: its place; fields in seconds end with ``Seconds``.
    """
    if kind == "text" and isinstance(value, int | float) and not isinstance(value, bool):
        return f': put it in quotes, "{value}"'
    short = isinstance(value, str) and len(value) <= _MOST_SHOWN
    number = kind.endswith("number") and short and re.fullmatch(r"[-+]?[0-9]+(\.[0-9]+)?", value)
    if number:
        return f": remove the quotes, {value}"
    duration = _DURATION.fullmatch(value) if short and here.endswith("Seconds") else None
    return f": write {int(duration[1]) * _UNITS_S[duration[2]]}" if duration else ""


def hint(name: str, known: Collection[str]) -> str:
    """Return the field that was probably meant, or all that there are."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(k for k in known if k != '$schema')}"


def _known_fields(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the fields that the model's JSON schema allows at a place."""
    schema = model.model_json_schema()
    node = _resolved(schema, schema)
    for part in loc:
        child = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
        node = _resolved(schema, child or {})
    return list(node.get("properties", ()))


def _resolved(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a node of a JSON schema without references and without its null alternative."""
    node = next((option for option in node.get("anyOf", ()) if option.get("type") != "null"), node)
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def shown(value: Any) -> str:
    """Return a wrong value for a message, in at most 60 characters and without passwords."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = redacted(json.dumps(value, default=str, ensure_ascii=False))
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"
