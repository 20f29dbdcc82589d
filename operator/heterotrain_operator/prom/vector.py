"""Answers to instant queries. Pure.

The labels of a row stay text until they are needed: most answers have exactly the series of the one before, and only
their values are new.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from heterotrain_operator.api.text import quoted
from heterotrain_operator.prom.errors import PromBadAnswer

MAX_SERIES = 50_000
"""Series of one answer, for each job: all of 160 ranks with 16 shapes, or of 500 ranks with 4."""
_ROWS = b'"result":['
_ROW = b'{"metric":{'
_VALUE = b'},"value":['
_LONGEST_HEAD = 200
"""Bytes within which the rows of an answer begin."""
_DIGEST_BYTES = 16
_ROWS_AT_ONCE = 100
"""The labels of so many rows are decoded within a fifth of a millisecond."""


class VectorSample(NamedTuple):
    """One row of an instant vector."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Vector:
    """The rows of an answer; iteration decodes them and leaves out those without a finite value.

    Attributes:
        texts: the labels of each row, as a JSON object.
        values: the value of each row, which may be infinite or not a number.
    """

    texts: tuple[bytes, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[VectorSample]) -> Vector:
        """Return an answer with these rows."""
        found = tuple(rows)
        return cls(tuple(json.dumps(dict(row.labels)).encode() for row in found), tuple(row.value for row in found))

    def __iter__(self) -> Iterator[VectorSample]:
        rows = zip(self.labels(), self.values, strict=True)
        return (VectorSample(labels, value) for labels, value in rows if math.isfinite(value))

    def labels(self) -> tuple[dict[str, str], ...]:
        """Return the labels of each row.

        Not all are decoded at once: one call for a large answer would hold the interpreter's lock, and all other jobs.

        Raises:
            PromBadAnswer: they are not JSON.
        """
        found: list[dict[str, str]] = []
        for start in range(0, len(self.texts), _ROWS_AT_ONCE):
            texts = self.texts[start : start + _ROWS_AT_ONCE]
            try:
                found += _decoded(b"[" + b",".join(texts) + b"]")
            except ValueError as error:
                raise _unreadable(error) from error
        return tuple(found)

    def digest(self) -> bytes:
        """Return 16 bytes that two answers share only if they have the same series in the same order."""
        return blake2b(b"\n".join(self.texts), digest_size=_DIGEST_BYTES).digest()


def parse_answer(body: bytes) -> Vector:
    """Return the rows of an answer as bytes; see ``parse_vector``.

    The rows are cut apart without decoding them. In JSON, the texts between which they are cut cannot be a part of a
    label: a quotation mark in a name or a value has a backslash.

    Raises:
        ValueError: this is not JSON.
        PromBadAnswer: this is not an answer to an instant query.
    """
    start = body.find(_ROWS, 0, _LONGEST_HEAD)
    head, *rows = body[start + len(_ROWS) :].split(_ROW) if start >= 0 else [body]
    if head or not rows:  # no rows, or spaces between them, or no answer at all
        return parse_vector(_decoded(body))
    texts, values, last = [], [], len(rows) - 1
    for place, row in enumerate(rows):
        labels, separator, rest = row.partition(_VALUE)
        _, _, rest = rest.partition(b',"')
        text, _, end = rest.partition(b'"')
        if not separator or (end != b"]}," if place < last else not end.startswith(b"]}]")):
            return parse_vector(_decoded(body))
        texts.append(b"{" + labels + b"}")
        values.append(text)
    parse_vector(_decoded(body[: start + len(_ROWS)] + end[len(b"]}") :]))  # says what is wrong, if anything is
    return _vector(texts, values)


def parse_vector(answer: Any) -> Vector:
    """Return the rows of a decoded answer to an instant query.

    Raises:
        PromBadAnswer: this is not an answer to an instant query.
    """
    if not isinstance(answer, Mapping) or answer.get("status") != "success":
        error = answer.get("error") if isinstance(answer, Mapping) else None
        problem = quoted(str(error)) if error else "its answer is not an answer to a query"
        raise PromBadAnswer(f"Prometheus reports an error: {problem}")
    try:
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
        if kind != "vector":
            raise PromBadAnswer(f"Prometheus answers with a {quoted(str(kind))} instead of a vector")
        labels = ({str(name): str(value) for name, value in row["metric"].items()} for row in result)
        texts = [json.dumps(each).encode() for each in labels]
        return _vector(texts, [row["value"][1] for row in result])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _unreadable(error) from error


def _vector(texts: list[bytes], values: list[Any]) -> Vector:
    if len(texts) > MAX_SERIES:
        raise PromBadAnswer(f"Prometheus has {len(texts)} series of this job; the operator reads {MAX_SERIES}")
    try:
        return Vector(tuple(texts), tuple(map(float, values)))
    except (ValueError, TypeError, OverflowError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> PromBadAnswer:
    return PromBadAnswer(f"the answer of Prometheus can't be read: {quoted(repr(error))}")


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body.decode(errors="replace"))
    except RecursionError as error:
        raise ValueError("too many nested lists") from error
