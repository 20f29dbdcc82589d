"""Reading YAML and JSON documents, and checking them against a schema that ships with this package.

JSON is read as JSON. YAML is read with the numbers of YAML 1.2, because PyYAML's default takes ``1e-3`` for a string
and ``010`` for eight, and a key that stands twice is refused instead of silently dropped.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError

from heterotrain_cli.errors import InputError

STANDARD_INPUT = "-"


class Loader(yaml.SafeLoader):
    """Safe YAML with YAML 1.2's core numbers and unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: D102, FBT001, FBT002  # PyYAML's own method
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)


def _whole(loader: Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


Loader.add_constructor("tag:yaml.org,2002:int", _whole)


def place(path: str) -> str:
    """Return how errors name the document."""
    return "standard input" if path == STANDARD_INPUT else path


def read_text(path: str) -> str:
    """Return the text of a file; ``-`` is standard input.

    Raises:
        InputError: it can't be read.
    """
    try:
        return sys.stdin.read() if path == STANDARD_INPUT else Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{place(path)}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{place(path)}: is not text in UTF-8: write it as YAML or JSON") from error


def read_document(path: str) -> Any:
    """Return the value of a YAML or JSON file; ``-`` is standard input.

    Raises:
        InputError: the file can't be read, or is neither YAML nor JSON.
    """
    return parse_document(read_text(path), where=place(path))


def parse_document(text: str, *, where: str) -> Any:
    """Return the value of a YAML or JSON text; ``where`` names it in errors.

    Raises:
        InputError: the text is neither YAML nor JSON, or holds more than one document.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text, object_pairs_hook=_unique)
        except json.JSONDecodeError:
            pass  # flow-style YAML starts with a brace, too
        except ValueError as error:
            raise InputError(f"{where}: {error}") from error
    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506  # derived from SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise InputError(f"{where}: is neither YAML nor JSON: {error.problem}{at}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{where}: is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: cannot be read as YAML: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in {k for k, _ in pairs[:i]})
        raise ValueError(f"the key {twice!r} stands twice")
    return found


@lru_cache
def schema_text(name: str) -> str:
    """Return the text of the JSON schema ``name`` that ships with this package."""
    return (resources.files("heterotrain_cli") / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8")


@lru_cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema_text(name)))


def check_document(document: Any, *, schema: str, where: str) -> None:
    """Return if the document keeps the schema.

    Raises:
        InputError: it does not; the message names the place and what is expected there.
    """
    if bad := _not_finite(document, ""):
        raise InputError(f"{where}: {bad} has to be a finite number")
    errors = sorted(_validator(schema).iter_errors(document), key=lambda error: [str(part) for part in error.path])
    if errors:
        raise InputError(f"{where}: {_sentence(errors[0])}")


def _not_finite(value: Any, at: str) -> str:
    """Return the place of the first number that is infinite or not a number, empty where all are finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return at or "the document"
    if isinstance(value, dict):
        parts = ((child, f"{at}.{key}" if at else str(key)) for key, child in value.items())
    elif isinstance(value, list):
        parts = ((child, f"{at}[{index}]") for index, child in enumerate(value))
    else:
        return ""
    return next((found for child, below in parts if (found := _not_finite(child, below))), "")


_KINDS = {
    "object": "a mapping", "array": "a list", "string": "text", "integer": "a whole number", "number": "a number",
    "boolean": "true or false",
}  # fmt: skip


_SENTENCES = {
    "minimum": "{here} is {value}, but has to be at least {limit}",
    "maximum": "{here} is {value}, but may be at most {limit}",
    "exclusiveMinimum": "{here} is {value}, but has to be more than {limit}",
    "minItems": "{here} has {length} entries, but needs at least {limit}",
    "maxItems": "{here} has {length} entries, but may have at most {limit}",
    "minLength": "{here} is empty",
    "enum": "{here} has to be one of {choices}, not {value}",
    "pattern": "{here} is {value}, which is not of the expected form {limit}",
}


def _sentence(error: ValidationError) -> str:
    """Return one sentence for people from one violation."""
    here = _path(error.absolute_path) or "the document"
    value: Any = error.instance
    limit: Any = error.validator_value
    schema: Any = error.schema
    match error.validator:
        case "required":
            return f"{here} lacks {next(name for name in limit if name not in value)}"
        case "additionalProperties":
            return _unknown(here, value, schema)
        case "type":
            kinds = [limit] if isinstance(limit, str) else list(limit)
            return f"{here} has to be {' or '.join(_KINDS[kind] for kind in kinds)}, not {_shown(value)}"
        case str(rule) if rule in _SENTENCES:
            length = len(value) if isinstance(value, list) else 0
            choices = ", ".join(map(str, limit)) if isinstance(limit, list) else ""
            return _SENTENCES[rule].format(here=here, value=_shown(value), limit=limit, length=length, choices=choices)
        case _:
            # Alternatives say in the schema itself what they mean.
            return f"{here}: {schema.get('$comment', error.message)}"


def _unknown(here: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    known = list(schema.get("properties", {}))
    name = next(str(key) for key in value if key not in known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(k for k in known if k != '$schema')}"
    return f"{here} has the unknown field {name}: {hint}"


def _path(path: Iterable[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"  # noqa: PLR2004  # one line on a terminal
