"""The schemas of all messages between ranks: types, and bounds on lengths and counts. Pure.

A message is checked after its sender has proved that it is of this job, and before anything of it is used. So a rank
of another version, or one whose memory is damaged, is refused by one sentence and never half understood. Fields that
this version does not know are left alone: a newer version may send more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
"""Whether a value has the right form."""
Fields = Mapping[str, Check]

MOST_RANKS = 1 << 16
MOST_COUNT = 2**53
LONGEST_NAME = 512
"""Uids, and names of devices and of operations."""
LONGEST_PLAN = 4 << 20
"""A plan fits a ConfigMap, which the API server limits to 1 MiB."""
MOST_DEVICES = 64
MOST_FRAMES = 256
"""Lines of a stack."""


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_COUNT


def _version_part(value: Any) -> bool:
    return type(value) is int and -1 <= value <= MOST_COUNT


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _flag(value: Any) -> bool:
    return type(value) is bool


def _text(longest: int) -> Check:
    return lambda value: type(value) is str and len(value) <= longest


def _list(each: Check, *, most: int) -> Check:
    return lambda value: type(value) is list and len(value) <= most and all(map(each, value))


def _row(*columns: Check) -> Check:
    return lambda value: (
        type(value) is list
        and len(value) == len(columns)
        and all(check(part) for check, part in zip(columns, value, strict=True))
    )


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


_NAME = _text(LONGEST_NAME)
_PEER = _row(_NAME, _count)
_FORMATION = _row(_count, _count)
_BALLOT = _row(_count, _count)
_RANKS = _list(_count, most=MOST_RANKS)
_DEVICE = _list(_NAME, most=MOST_DEVICES)
_ENVELOPE: Fields = {"op": _NAME, "job": _NAME, "to": _PEER, "from": _PEER}

REQUESTS: Mapping[str, Fields] = {
    "beat": {},
    "plan": {},
    "offer": {"text": _text(LONGEST_PLAN)},
    "keys": {"number": _count},
    "doing": {},
    "status": {"formation": _FORMATION},
    "broken": {"formation": _FORMATION},
    "prepare": {"formation": _FORMATION, "ballot": _BALLOT},
    "accept": {"formation": _FORMATION, "ballot": _BALLOT, "ranks": _RANKS},
    "decided": {"formation": _FORMATION, "ranks": _RANKS},
    "arrived": {"formation": _FORMATION, "device": _DEVICE},
    "store": {"formation": _FORMATION, "store": _row(_count, _list(_DEVICE, most=MOST_RANKS))},
}
"""Fields that a request has, besides those of every request."""
REPLIES: Mapping[str, Fields] = {
    "plan": {"text": _or_null(_text(LONGEST_PLAN))},
    "doing": {
        "steps": _count, "waits_for": _text(4096), "waits_s": _seconds, "stack": _list(_text(4096), most=MOST_FRAMES),
    },
    "status": {"decided": _or_null(_RANKS), "finished": _flag, "hopeless": _flag},
    "prepare": {
        "promised": _flag, "leaving": _flag, "lost": _RANKS, "accepted": _or_null(_row(_BALLOT, _RANKS)),
    },
    "accept": {"accepted": _flag},
    "store": {"comes": _flag},
}  # fmt: skip
"""Fields that a reply may have, by its request."""
_EVERY_REPLY: Fields = {
    "version": _row(_version_part, _version_part), "standing": _FORMATION, "broken": _flag, "error": _text(4096),
}  # fmt: skip


def request_problem(message: Mapping[str, Any]) -> str:
    """Return what is wrong with a request, for a log line; empty for nothing.

    Of a request that this version does not know, the fields of every request are checked.
    """
    own = REQUESTS.get(message["op"], {}) if _NAME(message.get("op")) else {}
    wrong = [name for name, check in {**_ENVELOPE, **own}.items() if name not in message or not check(message[name])]
    return f"field {wrong[0]!r} is missing or not of its form" if wrong else ""


def checked_request(message: dict[str, Any]) -> dict[str, Any]:
    """Return a request.

    Raises:
        ValueError: something is wrong with it.
    """
    if problem := request_problem(message):
        raise ValueError(problem)
    return message


def reply_problem(op: str, reply: Mapping[str, Any]) -> str:
    """Return what is wrong with a reply, for a log line; empty for nothing. Missing fields are not wrong."""
    checks = {**REPLIES.get(op, {}), **_EVERY_REPLY}
    wrong = [name for name, check in checks.items() if name in reply and not check(reply[name])]
    return f"field {wrong[0]!r} is not of its form" if wrong else ""
