"""The plan survives its codec, and a reader refuses what it must not use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from heterotrain_core.contract.codec import Refused, decode_plan, encode_plan
from heterotrain_core.contract.plan import (
    Binding,
    Boundary,
    BoundaryKind,
    CommunicationTime,
    ComputeTime,
    Member,
    Plan,
    Prediction,
)
from hypothesis import given
from hypothesis import strategies as st

seconds = st.floats(min_value=0, max_value=1e3, allow_nan=False)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw any sound plan of up to six members."""
    shares = draw(st.lists(st.integers(0, 512), min_size=1, max_size=6))
    members = tuple(
        Member(
            rank=rank,
            worker=f"job-w{rank}",
            worker_uid=draw(st.uuids()).hex,
            address=f"10.0.0.{rank}",
            peer_port=29400,
            pool=draw(st.sampled_from(["a100", "t4-spot"])),
            on_demand=draw(st.booleans()),
            share_samples=share,
            micro_batch_samples=draw(st.integers(0, 64)),
            cap_samples=draw(st.none() | st.integers(512, 4096)),
            compute=draw(
                st.none()
                | st.builds(
                    ComputeTime,
                    per_sample_s=seconds,
                    fixed_s=seconds,
                    backward_per_sample_s=seconds,
                    backward_fixed_s=seconds,
                )
            ),
        )
        for rank, share in enumerate(shares)
    )
    probing = draw(st.booleans())
    return Plan(
        job_uid="uid-1",
        generation=draw(st.integers(1, 9)),
        revision=draw(st.integers(0, 9)),
        members=members,
        global_batch_samples=sum(shares),
        boundary=draw(
            st.sampled_from(
                [Boundary(), Boundary(kind=BoundaryKind.STEPS, every_steps=7), Boundary(kind=BoundaryKind.NEVER)]
            )
        ),
        drain=tuple(draw(st.lists(st.sampled_from(["job-w0", "job-w1"]), unique=True))),
        probe=(tuple(reversed(shares)),) if probing else (),
        probe_steps=3 if probing else 0,
        communication=draw(st.none() | st.builds(CommunicationTime, overlapped_s=seconds, last_bucket_s=seconds)),
        prediction=draw(
            st.none()
            | st.just(
                Prediction(
                    step_s=0.3, efficiency=0.9, efficiency_ceiling=0.95, bindings=tuple(Binding.COMPUTE for _ in shares)
                )
            )
        ),
        reason=draw(st.text(max_size=20)),
    )


@given(plans())
def test_a_plan_survives_the_round_trip(plan: Plan) -> None:
    """What one side writes the other side reads, value for value."""
    assert plan == decode_plan(encode_plan(plan), job_uid="uid-1")


def a_plan(**changes: Any) -> Plan:
    """Return a small sound plan with the given fields changed."""
    member = Member(
        rank=0,
        worker="w0",
        worker_uid="u",
        address="10.0.0.1",
        peer_port=29400,
        pool="p",
        on_demand=True,
        share_samples=8,
    )
    return Plan(
        **{"job_uid": "uid-1", "generation": 2, "revision": 5, "members": (member,), "global_batch_samples": 8}
        | changes
    )


def edited(plan: Plan, **changes: Any) -> str:
    """Return the plan's JSON with top-level fields changed, as a foreign writer might."""
    return json.dumps(json.loads(encode_plan(plan)) | changes)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        (edited(a_plan(), schema=99), "schema 99"),
        (edited(a_plan(), surprise=1), "unknown fields ['surprise']"),
        (edited(a_plan(), generation="2"), "plan.generation has to be int"),
        (edited(a_plan(), generation=True), "plan.generation has to be int"),
        (edited(a_plan(), global_batch_samples=9), "sums to 8"),
        (edited(a_plan(), boundary={"kind": "sometimes"}), "sometimes"),
        (edited(a_plan(), members=[{"rank": 0}]), "missing"),
        (edited(a_plan(), job_uid="other"), "for job other"),
        (edited(a_plan(), generation=1, revision=99), "older than (2, 4)"),
        (edited(a_plan(), revision=2**60), "no newer plan could follow"),
        (edited(a_plan(), revision=10**30), "plan.revision is beyond"),
        (edited(a_plan(), communication={"overlapped_s": 10**400}), "plan.communication.overlapped_s is not a finite"),
        (edited(a_plan(), communication={"overlapped_s": float("nan")}), "overlapped_s is not a finite number"),
        (edited(a_plan(), communication={"overlapped_s": float("inf")}), "overlapped_s is not a finite number"),
        (
            edited(
                a_plan(),
                prediction={"step_s": 0.0, "efficiency": 1.0, "efficiency_ceiling": 1.0, "bindings": ["Compute"] * 2},
            ),
            "a step that takes no time",
        ),
    ],
)
def test_a_bad_plan_is_refused_with_its_reason(text: str, word: str) -> None:
    """A reader never raises, and states the problem."""
    answer = decode_plan(text, job_uid="uid-1", newest=(2, 4))
    assert isinstance(answer, Refused)
    assert word in answer.reason


def test_the_same_version_is_read_again() -> None:
    """A reader that already holds this version may read it again: the order is not strict."""
    assert isinstance(decode_plan(encode_plan(a_plan()), job_uid="uid-1", newest=(2, 5)), Plan)


def test_a_contradictory_plan_is_never_written() -> None:
    """The writer refuses before any pod could see it."""
    with pytest.raises(ValueError, match="sums to 8"):
        encode_plan(a_plan(global_batch_samples=7))
