"""A document from which a converter takes what it uses: whatever stays in it is named, also what no one thought of."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

_MOST_CHARACTERS: Final = 80
MOST_LINES: Final = 200
"""Of what is left. Names of YAML for other parts of a file make a small one stand for billions of values."""


class WrongPartError(TypeError):
    """A part of a document has another type than it must have; the message is a sentence without its end."""


class Rest:
    """What is left of a copy of a document."""

    def __init__(self, document: Any, path: str = "") -> None:
        """Begin with all of it; ``path`` is where it was in the file.

        Raises:
            WrongPartError: it is not an object.
        """
        if not isinstance(document, Mapping):
            raise WrongPartError(f"{path or 'the document'} is not an object")
        self._document = copy.deepcopy(dict(document))
        self._path = path
        self._parts: list[Rest] = []

    def __contains__(self, name: str) -> bool:
        """Return whether there is a value of this name."""
        return self._document.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Return the names of the values that are left."""
        return iter(list(self._document))

    def peek(self, name: str) -> Mapping[str, Any]:
        """Return an object that stays; an empty one where there is none."""
        value = self._document.get(name)
        return value if isinstance(value, Mapping) else {}

    def peek_text(self, name: str) -> str:
        """Return a value that stays, as text."""
        return str(self._document.get(name))

    def take(self, name: str, default: Any = None) -> Any:
        """Remove and return a value; the default for a missing one and for null."""
        value = self._document.pop(name, None)
        return default if value is None else value

    def take_one_of(self, name: str, *values: Any) -> None:
        """Remove a value that means what a job does anyway; any other one stays."""
        if self._document.get(name) in values:
            del self._document[name]

    def object(self, name: str) -> dict[str, Any]:
        """Remove and return an object; an empty one where it is missing.

        Raises:
            WrongPartError: it is not an object.
        """
        value = self.take(name, {})
        if not isinstance(value, Mapping):
            raise WrongPartError(f"{self._below(name)} is not an object")
        return dict(value)

    def part(self, name: str) -> Rest:
        """Remove an object and return it as a part; what is left of it is named with the rest of this document."""
        found = Rest(self.object(name), self._below(name))
        self._parts.append(found)
        return found

    def items(self, name: str, label: str = "") -> list[Rest]:
        """Remove a list of objects and return each as a part; ``label`` is the field that names an item."""
        found = []
        for number, each in enumerate(self.take(name, [])):
            which = each.get(label, number) if isinstance(each, Mapping) else number
            found.append(Rest(each, f"{self._below(name)}[{which}]"))
        self._parts += found
        return found

    def put(self, name: str, value: Any) -> None:
        """Put a value back."""
        self._document[name] = value

    def drop(self, *names: str) -> None:
        """Remove what has no meaning outside of the place that it was read from."""
        for name in names:
            self._document.pop(name, None)

    def left(self) -> list[str]:
        """Return every value that was not taken, with its place; the first ``MOST_LINES`` of them."""
        found = list(itertools.islice(self._left(), MOST_LINES + 1))
        return found if len(found) <= MOST_LINES else [*found[:MOST_LINES], "…, and more"]

    def _left(self) -> Iterator[str]:
        for name, value in self._document.items():
            yield from _lines(value, self._below(name))
        for part in self._parts:
            yield from part._left()  # noqa: SLF001  # of the same class

    def _below(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _lines(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _lines(each, f"{path}.{name}")
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value):
            yield from _lines(each, f"{path}[{number}]")
    elif value not in (None, "", []):
        text = value if isinstance(value, str) else _json(value)
        yield f"{path}: {text[:_MOST_CHARACTERS]}{' …' if len(text) > _MOST_CHARACTERS else ''}"


def _json(value: Any) -> str:
    """Return the beginning of a value's JSON, one character longer than what is shown."""
    text = ""
    for part in json.JSONEncoder(default=str).iterencode(value):
        text += part
        if len(text) > _MOST_CHARACTERS:
            break
    return text
