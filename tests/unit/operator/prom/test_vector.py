"""Answers of Prometheus are cut into rows without decoding them, whatever their labels contain."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from heterotrain_operator.prom.errors import PromBadAnswer
from heterotrain_operator.prom.vector import Vector, VectorSample, parse_answer, parse_vector

PARTS = ('"', "\\", "{", "}", "[", "]", ",", ":", "metric", "value", "result", "1", "é", "\u2028", "\n", "\x00", "🦆")


def answer_of(rows: list[Any]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "vector", "result": rows}}


def compact(answer: object, *, ascii_only: bool = True) -> bytes:
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=ascii_only).encode()


@pytest.mark.parametrize("ascii_only", [True, False])
def test_labels_that_look_like_the_ends_of_rows_cut_nothing(*, ascii_only: bool) -> None:
    rng = random.Random(1)  # noqa: S311  # reproducible

    def text() -> str:
        wild = ('},"value":[', '{"metric":{', '"]},{"metric":{"a":"', '"result":[', "".join(rng.choices(PARTS, k=12)))
        return rng.choice(wild)

    for _ in range(500):
        rows = [
            {"metric": {text(): text() for _ in range(rng.randint(0, 4))}, "value": [1.5, rng.choice(("0.5", "NaN"))]}
            for _ in range(rng.randint(0, 4))
        ]
        body = compact(answer_of(rows), ascii_only=ascii_only)
        assert tuple(parse_answer(body)) == tuple(parse_vector(json.loads(body)))


@pytest.mark.parametrize(
    "rest",
    [
        '"histogram":[1,{"count":"1"}]}',
        '"value":[1,2]}',
        '"value":[1,"2","3"]}',
        '"value":[1,"2"],"more":1}',
        '"value":{"1":"2"}}',
    ],
)
def test_a_row_of_another_form_is_read_as_json_or_refused(rest: str) -> None:
    for rows in (f'{{"metric":{{}},{rest}', f'{{"metric":{{}},"value":[1,"7"]}},{{"metric":{{}},{rest}'):
        for all_rows in (rows, f'{rows},{{"metric":{{}},"value":[1,"9"]}}'):
            body = f'{{"status":"success","data":{{"resultType":"vector","result":[{all_rows}]}}}}'.encode()
            try:
                expected: tuple[VectorSample, ...] | None = tuple(parse_vector(json.loads(body)))
            except PromBadAnswer:
                expected = None
            try:
                found: tuple[VectorSample, ...] | None = tuple(parse_answer(body))
            except PromBadAnswer:
                found = None
            assert found == expected


def test_an_error_after_the_rows_is_reported() -> None:
    rows = [{"metric": {"a": "b"}, "value": [1, "2"]}]
    body = compact({"data": {"resultType": "vector", "result": rows}, "status": "error", "error": "too slow"})
    with pytest.raises(PromBadAnswer, match="reports an error: too slow"):
        parse_answer(body)
    matrix = compact({"data": {"resultType": "matrix", "result": rows}, "status": "success"})
    with pytest.raises(PromBadAnswer, match="answers with a matrix instead of a vector"):
        parse_answer(matrix)


def test_labels_that_are_no_json_are_refused_when_they_are_decoded() -> None:
    broken = Vector((b'{"a":}',), (1.0,))
    with pytest.raises(PromBadAnswer, match="can't be read"):
        tuple(broken)


def test_answers_with_the_same_series_have_the_same_digest() -> None:
    one, other = VectorSample({"a": "b"}, 1.0), VectorSample({"a": "c"}, 1.0)
    assert Vector.of([one, other]).digest() == Vector.of([one._replace(value=2.0), other]).digest()
    digests = [Vector.of(rows).digest() for rows in ([], [one], [one, one], [one, other], [other, one])]
    assert len(set(digests)) == len(digests)
