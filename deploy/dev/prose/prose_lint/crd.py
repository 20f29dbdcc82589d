"""The texts of a CustomResourceDefinition as passages: descriptions of fields, and messages of its CEL rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from prose_lint.passages import Document, Passage

_TEXTS = frozenset({"description", "message"})


def read(path: Path, text: str) -> Document:
    """Return the document of a CRD in YAML."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return Document(path=path, lines=tuple(text.split("\n")), passages=tuple(_passages(path, root, "", named=False)))


def _passages(path: Path, node: yaml.Node | None, where: str, *, named: bool) -> Iterator[Passage]:
    """Yield the texts below a node; ``named`` says whether its keys are names of fields."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _passages(path, item, where, named=False)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = str(key.value)
        if not named and name in _TEXTS and isinstance(value, yaml.ScalarNode):
            mark = value.start_mark
            raw = str(value.value)
            yield Passage(
                path=path, line=mark.line + 1, column=mark.column + 1, raw=raw, text=raw, where=where or "the kind"
            )
            continue
        yield from _passages(path, value, _place(where, name, named=named), named=not named and name == "properties")


def _place(where: str, key: str, *, named: bool) -> str:
    if named:
        return f"{where}.{key}" if where else key
    return f"{where}[]" if key == "items" else where
