"""Messages of ranks are checked before they are used: what passes raises nothing, what is wrong changes nothing."""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

import pytest
from heterotrain.identity import Identity, Mode
from heterotrain.membership.consensus.peer_state import PeerState
from heterotrain.membership.peer_service import PeerService
from heterotrain.membership.plan_source import PlanSource
from heterotrain.network.authentication import Credentials
from heterotrain.network.hang import Activity, from_reply, to_reply
from heterotrain.network.schemas import LONGEST_NAME, MOST_RANKS, REPLIES, REQUESTS, reply_problem, request_problem

FORMATION = [3, 1]
BODIES: dict[str, dict[str, Any]] = {
    "beat": {}, "plan": {}, "doing": {}, "offer": {"text": "{}"}, "keys": {"number": 5},
    "status": {"formation": FORMATION}, "broken": {"formation": FORMATION},
    "prepare": {"formation": FORMATION, "ballot": [1, 0]},
    "accept": {"formation": FORMATION, "ballot": [1, 0], "ranks": [0, 2]},
    "decided": {"formation": FORMATION, "ranks": []},
    "arrived": {"formation": FORMATION, "device": ["GPU-1", "boot/0:1:0"]},
    "store": {"formation": FORMATION, "store": [5, [["GPU-1"], []]]},
}  # fmt: skip
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2**53, 2**60, 1.5, 1e308, math.inf, math.nan, "", "x", "x" * (LONGEST_NAME + 1),
    [], {}, [None], [[]], [1], [1, 2], [1, "2"], [-1, 0], [True, 0], [0] * (MOST_RANKS + 1), {"a": 1}, [[1, 0], [0]],
]  # fmt: skip


@pytest.fixture
def service() -> PeerService:
    """A rank's service with its record of formations, not listening."""
    identity = Identity(mode=Mode.OPERATED, job_uid="j", worker="a", worker_uid="a-uid", peer_port=1)
    made = PeerService(identity, PlanSource(None, job_uid="j"), timeout_s=1.0, credentials=Credentials(secret=b""))
    PeerState(made, on_broken=lambda _reason: None)
    return made


def message(op: str, **changes: Any) -> dict[str, Any]:
    """Return a request as it arrives."""
    whole = {"op": op, "job": "j", "to": ["a-uid", 0], "from": ["b-uid", 1], **BODIES[op]} | changes
    found: dict[str, Any] = json.loads(json.dumps(whole))
    return found


def test_every_handler_has_a_schema(service: PeerService) -> None:
    assert {*service.handlers, "keys", "doing"} == {*REQUESTS}
    assert {*BODIES} == {*REQUESTS}
    assert {*REPLIES} <= {*REQUESTS}


@pytest.mark.parametrize("op", BODIES)
def test_an_honest_request_and_its_reply_pass(service: PeerService, op: str) -> None:
    assert request_problem(message(op)) == ""
    if op in service.handlers:
        reply = asyncio.run(service._answer(message(op)))
        assert "error" not in reply
        assert reply_problem(op, json.loads(json.dumps(reply))) == ""


def test_the_reply_of_a_rank_that_waits_or_works_passes() -> None:
    for activity in (
        Activity(rank=0, name="a/0", steps=7, waits_for="step.apply", waits_s=0.5),
        Activity(rank=0, name="a/0", stack=("File x, line 1", "  x()")),
    ):
        reply = json.loads(json.dumps(to_reply(activity)))
        assert reply_problem("doing", reply) == ""
        assert from_reply(0, "a/0", reply) == activity


@pytest.mark.parametrize("op", BODIES)
def test_each_field_is_needed_in_its_form(op: str) -> None:
    for field in {**BODIES[op], "job": "", "to": [], "from": []}:
        whole = message(op)
        del whole[field]
        assert repr(field) in request_problem(whole)
        assert repr(field) in request_problem(message(op, **{field: {"odd": 1}}))


def test_what_a_newer_version_adds_is_left_alone(service: PeerService) -> None:
    assert request_problem(message("accept", term=9)) == ""
    assert reply_problem("accept", {"accepted": True, "term": 9}) == ""
    newer = message("beat") | {"op": "later"}
    assert request_problem(newer) == ""
    assert asyncio.run(service._answer(newer)) == {"error": "unknown request 'later'"}


@pytest.mark.parametrize("op", BODIES)
def test_no_request_that_passes_raises_and_no_other_is_used(service: PeerService, op: str) -> None:
    """1,000 messages of each kind with odd values in any place, also inside of lists."""
    rng = random.Random(op)  # noqa: S311  # reproducible
    passed = 0
    for _ in range(1000):
        whole = message(op)
        for _ in range(rng.choice((1, 1, 2))):
            field = rng.choice([*whole])
            if isinstance(whole[field], list) and whole[field] and rng.random() < 0.5:
                whole[field][rng.randrange(len(whole[field]))] = rng.choice(ODD)
            else:
                whole[field] = rng.choice(ODD)
        if request_problem(whole):
            continue
        passed += 1
        if whole["op"] in service.handlers:
            reply = asyncio.run(service._answer(whole))
            assert reply_problem(whole["op"], json.loads(json.dumps(reply))) == ""
    assert 0 < passed < 1000


def test_odd_replies_are_refused() -> None:
    """Those that pass can be read."""
    rng = random.Random(5)  # noqa: S311  # reproducible
    honest = {"version": [1, 2], "standing": [3, 1], "broken": False}
    for _ in range(5000):
        op = rng.choice([*REQUESTS])
        reply = honest | {rng.choice([*honest, *REPLIES.get(op, ())]): rng.choice(ODD)}
        if not reply_problem(op, reply):
            assert list(reply["version"]) < [2**53 + 1, 0]
            assert all(isinstance(part, int) for part in reply["standing"])
            from_reply(0, "a/0", reply)
