"""Frames between peers: four bytes of length, then JSON. No pickle: a listener must not execute received data."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

MAX_FRAME_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct("!I")


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError: the connection ended.
        ValueError: the received bytes are not a valid message.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
    body = await reader.readexactly(length)
    try:
        message = json.loads(body)
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("a message has to be a JSON object")
    return message


async def write_frame(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send one message."""
    writer.write(to_frame(message))
    await writer.drain()


def to_frame(message: dict[str, Any]) -> bytes:
    """Return a message as it travels."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body
