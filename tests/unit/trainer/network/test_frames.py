"""Bytes that anybody may send to a rank's port: a frame is a JSON object, or one of two errors."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from typing import Any

import pytest
from heterotrain.network.frames import MAX_FRAME_BYTES, read_frame


async def read(raw: bytes) -> dict[str, Any] | str:
    """Return the message, or the name of the error."""
    reader = asyncio.StreamReader()
    reader.feed_data(raw)
    reader.feed_eof()
    try:
        return await read_frame(reader)
    except asyncio.IncompleteReadError:
        return "incomplete"
    except ValueError:
        return "invalid"


def frame(body: bytes, length: int | None = None) -> bytes:
    return struct.pack("!I", len(body) if length is None else length) + body


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"1" * 10_000, b"\xff\xfe", b"", b"nul"],
    ids=["deep list", "deep object", "no object", "long number", "no text", "empty", "no JSON"],
)
async def test_a_frame_that_is_no_message_is_refused(body: bytes) -> None:
    assert await read(frame(body)) == "invalid"


async def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    assert await read(frame(b"", MAX_FRAME_BYTES + 1)) == "invalid"
    assert await read(frame(b"", MAX_FRAME_BYTES)) == "incomplete"


async def test_no_random_frame_raises_another_error() -> None:
    """Random bytes, and messages with parts cut off or replaced."""
    rng = random.Random(3)  # noqa: S311  # reproducible
    whole = frame(json.dumps({"kind": "promise", "members": [1, 2, 3], "nested": {"é": None}}).encode())
    found = set()
    for _ in range(10_000):
        raw = bytearray(whole)
        for _ in range(rng.choice((0, 1, 3))):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        cut = bytes(raw[: rng.randrange(len(raw) + 1)]) if rng.random() < 0.3 else bytes(raw)
        answer = await read(cut if rng.random() < 0.8 else rng.randbytes(rng.randrange(64)))
        found.add(answer if isinstance(answer, str) else "message")
    assert found == {"message", "incomplete", "invalid"}
