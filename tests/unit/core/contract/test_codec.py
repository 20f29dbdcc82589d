"""The plan survives its codec, and a reader refuses what it must not use."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from heterotrain_core.contract.codec import Refused, decode_plan, encode_plan
from heterotrain_core.contract.consistency import MAX_UNITS, MAX_WEIGHT, problems
from heterotrain_core.contract.hiccups import Hiccups
from heterotrain_core.contract.plan import (
    Binding,
    Boundary,
    BoundaryKind,
    CommunicationTime,
    ComputeTime,
    Layout,
    LayoutKind,
    Plan,
    Prediction,
)
from hypothesis import given
from hypothesis import strategies as st
from support.plans import members_with, plan_of

seconds = st.floats(min_value=0, max_value=1e3, allow_nan=False)


layouts = st.one_of(
    st.just(Layout()),
    st.builds(Layout, kind=st.just(LayoutKind.SHARDED), shards=st.integers(1, 4)),
    st.lists(st.tuples(st.integers(1, MAX_WEIGHT), st.integers(1, MAX_WEIGHT)), min_size=1, max_size=4).map(
        lambda pairs: Layout(
            kind=LayoutKind.SHARDED,
            shards=len(pairs),
            state_weights=tuple(state for state, _ in pairs),
            sample_weights=tuple(samples for _, samples in pairs),
        )
    ),
    st.builds(
        Layout,
        kind=st.just(LayoutKind.PIPELINE),
        cuts=st.sets(st.integers(1, MAX_UNITS - 1), max_size=3).map(lambda cuts: tuple(sorted(cuts))),
        shards=st.integers(1, 2),
        recomputing=st.sampled_from([(), (0,)]),
    ),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw any sound plan of up to six members."""
    shares = draw(st.lists(st.integers(0, 512), min_size=1, max_size=6))
    members, ranks = members_with([draw(layouts) for _ in shares], shares)
    members = tuple(
        replace(
            member,
            pool=draw(st.sampled_from(["a100", "t4-spot"])),
            micro_batch_samples=draw(st.integers(0, 64)),
            cap_samples=draw(st.none() | st.integers(512, 4096)),
            granularity_samples=draw(st.integers(1, 8)),
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
        for member in members
    )
    ranks = tuple(
        replace(
            rank,
            worker_uid=draw(st.uuids()).hex,
            on_demand=draw(st.booleans()),
            pool=draw(st.sampled_from(["", "v100"])),
        )
        for rank in ranks
    )
    probing = draw(st.booleans())
    return Plan(
        job_uid="uid-1",
        generation=draw(st.integers(1, 9)),
        revision=draw(st.integers(0, 9)),
        members=members,
        ranks=ranks,
        spares=tuple(draw(st.lists(st.sampled_from(["spare-1", "spare-2"]), unique=True))),
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
                    step_s=0.3,
                    efficiency=0.9,
                    efficiency_ceiling=0.95,
                    bindings=tuple(Binding.COMPUTE for _ in shares),
                    hiccups=draw(st.sampled_from([Hiccups(), Hiccups(rate=0.01, pause_s=1.5)])),
                    own_s=0.2,
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
    return plan_of([8], job_uid="uid-1", **({"generation": 2, "revision": 5} | changes))


PREDICTION = {"step_s": 1.0, "efficiency": 1.0, "efficiency_ceiling": 1.0, "bindings": ["Compute"]}
MEMBER = {"index": 0, "pool": "p", "share_samples": 8}


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
        (edited(a_plan(), schema=True), "schema True"),
        (edited(a_plan(), schema=2), "schema 2"),
        (edited(a_plan(), members=[{**MEMBER, "layout": {"kind": "Sharded", "shards": 10**18}}]), "has 1 ranks"),
        (edited(a_plan(), surprise=1), "unknown fields ['surprise']"),
        (edited(a_plan(), generation="2"), "plan.generation has to be int"),
        (edited(a_plan(), generation=True), "plan.generation has to be int"),
        (edited(a_plan(), global_batch_samples=9), "sums to 8"),
        (edited(a_plan(), boundary={"kind": "sometimes"}), "sometimes"),
        (edited(a_plan(), members=[{"index": 0}]), "missing"),
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
        (edited(a_plan(), prediction={**PREDICTION, "hiccups": {"rate": 0.7}}), "a rate of long steps of 0.7"),
        (edited(a_plan(), prediction={**PREDICTION, "hiccups": {"ratio": -1.0}}), "long steps beyond 100 times"),
        (edited(a_plan(), prediction={**PREDICTION, "hiccups": {"rate": 0.1, "pause_s": 1.0}}), "own times of 0.0 s"),
        (edited(a_plan(), prediction={**PREDICTION, "own_s": -1.0}), "own times of -1.0 s"),
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


SHARDED, CUT = Layout(kind=LayoutKind.SHARDED, shards=2), Layout(kind=LayoutKind.PIPELINE, cuts=(3, 5), shards=2)


def of_layouts(*layouts: Layout) -> Plan:
    """Return a sound plan of members with these layouts and 4 samples each."""
    return plan_of([4] * len(layouts), layouts=layouts)


def with_rank(plan: Plan, number: int, **fields: Any) -> Plan:
    """Return the plan with fields of one rank changed."""
    ranks = [replace(rank, **fields) if rank.rank == number else rank for rank in plan.ranks]
    return replace(plan, ranks=tuple(ranks))


def with_layout(plan: Plan, **fields: Any) -> Plan:
    """Return the plan with fields of the first member's layout changed."""
    return with_member(plan, layout=replace(plan.members[0].layout, **fields))


def with_member(plan: Plan, **fields: Any) -> Plan:
    """Return the plan with fields of the first member changed."""
    return replace(plan, members=(replace(plan.members[0], **fields), *plan.members[1:]))


WHOLE = of_layouts(SHARDED, Layout(), CUT)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(WHOLE, ranks=WHOLE.ranks[:-1]), "member 2 has 5 ranks, but its layout has 6 places"),
        (replace(WHOLE, ranks=WHOLE.ranks[1:]), "ranks are not listed by rank"),
        (with_rank(WHOLE, 0, member=1), "ranks are not listed member by member"),
        (with_rank(WHOLE, 0, member=3), "rank 0 is of member 3, which the plan does not name"),
        (with_rank(WHOLE, 0, member=-1), "rank 0 is of member -1, which the plan does not name"),
        (with_rank(WHOLE, 4, stage=2), "the ranks of member 2 are not listed stage by stage and shard by shard"),
        (with_rank(WHOLE, 1, shard=0), "the ranks of member 0 are not listed stage by stage and shard by shard"),
        (with_rank(WHOLE, 1, worker="w0"), "a rank is named twice"),
        (with_rank(WHOLE, 1, local_rank=-1), "rank 1 has local rank -1"),
        (with_rank(WHOLE, 1, peer_port=70_000), "peer port 70000"),
        (replace(WHOLE, members=WHOLE.members[::-1]), "members are not listed by index"),
        (with_layout(WHOLE, shards=0), "member 0 has 0 shards"),
        (with_layout(WHOLE, kind=LayoutKind.REPLICATED), "member 0 is replicated, but has 2 shards"),
        (with_layout(WHOLE, state_weights=(1, 2, 3)), "member 0 has 3 state weights for 2 shards"),
        (with_layout(WHOLE, state_weights=(0, 2)), "has state weights outside of 1 to"),
        (with_layout(WHOLE, sample_weights=(0, 0)), "has sample weights outside of 0 to"),
        (with_layout(WHOLE, sample_weights=(1, MAX_WEIGHT + 1)), "has sample weights outside of 0 to"),
        (of_layouts(Layout(state_weights=(1,))), "has state weights, but is not sharded"),
        (with_layout(WHOLE, cuts=(1,)), "member 0 is cut into stages, but is not a pipeline"),
        (with_layout(of_layouts(CUT), cuts=(5, 3)), "cuts that do not ascend"),
        (with_layout(of_layouts(CUT), cuts=(0, 3)), "cuts that do not ascend"),
        (with_layout(of_layouts(CUT), recomputing=(3,)), "has 3 stages, of which 3 cannot recompute"),
        (with_layout(of_layouts(CUT), recomputing=(1, 0)), "of which 1, 0 cannot recompute"),
        (with_layout(WHOLE, recomputing=(0,)), "cannot recompute"),
        (with_layout(of_layouts(CUT), cuts=(3, MAX_UNITS)), "cuts that do not ascend"),
        (replace(WHOLE, spares=("w0",)), "a spare is named twice, or is in a member"),
        (replace(WHOLE, spares=("s", "s")), "a spare is named twice, or is in a member"),
        (replace(WHOLE, probe=((4, 4, 2, 2),), probe_steps=1), "probe 0 has 4 entries for 3 members"),
        (replace(WHOLE, members=(replace(WHOLE.members[0], granularity_samples=0), *WHOLE.members[1:])), "granularity"),
        (
            replace(WHOLE, members=(replace(WHOLE.members[0], micro_batch_samples=-1), *WHOLE.members[1:])),
            "micro-batch",
        ),
        (replace(WHOLE, members=(replace(WHOLE.members[0], cap_samples=-1), *WHOLE.members[1:])), "cap of -1"),
    ],
)
def test_members_have_all_their_ranks_in_order(plan: Plan, words: str) -> None:
    assert not problems(WHOLE)
    assert words in "; ".join(problems(plan))


def test_a_set_of_ranks_consists_of_whole_members() -> None:
    """A member that lacks a rank is broken, whatever the layout; the ranks of the others stay."""
    assert WHOLE.whole_members(range(9)) == (0, 1, 2)
    assert WHOLE.whole_members([0, 2, 3, 4, 5, 6, 7, 8]) == (1, 2)
    assert WHOLE.ranks_of_whole_members([0, 1, 2, 3, 4, 5, 6, 7]) == (0, 1, 2)
    assert WHOLE.whole_members([]) == ()


def test_replicas_are_members_on_pods_of_their_own() -> None:
    """Eight replicated ranks of one pod fail together, so they count once; a pipeline counts once for all its pods."""
    assert WHOLE.replicas(range(9)) == 3
    assert WHOLE.replicas(range(1, 9)) == 2
    one_pod = of_layouts(*[Layout()] * 4)
    for number in (0, 1, 2):
        one_pod = with_rank(one_pod, number, worker="w", local_rank=number)
    assert one_pod.replicas(range(4)) == 2
    assert one_pod.replicas([0]) == 1


def test_a_plan_of_a_thousand_ranks_fits_a_config_map_several_times() -> None:
    """Bytes for each rank, with a learned model, two probes and a prediction."""
    count = 1024
    plan = plan_of([65_536 // count] * count, job_uid="0" * 36)
    compute = ComputeTime(
        per_sample_s=0.0123456789012345,
        fixed_s=0.0123456789012345,
        backward_per_sample_s=0.0123456789012345,
        backward_fixed_s=0.0123456789012345,
        update_s=0.0123456789012345,
    )
    members = tuple(replace(m, pool="a100-spot", micro_batch_samples=32, compute=compute) for m in plan.members)
    ranks = tuple(
        replace(r, worker=f"language-model-w{r.rank}", worker_uid="0" * 36, address="10.128.255.255", peer_port=29400)
        for r in plan.ranks
    )
    plan = replace(
        plan,
        members=members,
        ranks=ranks,
        probe=(plan.shares,) * 2,
        probe_steps=5,
        prediction=Prediction(step_s=0.3, efficiency=0.9, efficiency_ceiling=0.9, bindings=(Binding.COMPUTE,) * count),
    )
    assert len(encode_plan(plan).encode()) / count < 455
