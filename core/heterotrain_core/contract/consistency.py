"""The rules that a plan has to keep, checked by its writer and by every reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from heterotrain_core.contract.plan import BoundaryKind, Layout, LayoutKind, Member, Plan, Prediction, Rank

MAX_UNITS = 2**16
"""Limit of the units of a model, and so of the places where it may be cut."""
MAX_WEIGHT = 2**20
"""Limit of the numbers that divide state and samples among shards."""
MAX_PORT = 2**16 - 1
MAX_REQUEST_CHARS = 64
_LEAST_S = 1e-9
"""Least own time to which a pause can be compared."""


def problems(plan: Plan) -> tuple[str, ...]:
    """Return every way in which the plan contradicts itself, each as one sentence; empty when it is sound."""
    return (*_counters(plan), *_members(plan), *_ranks(plan), *_vectors(plan))


def _counters(plan: Plan) -> Iterator[str]:
    if plan.generation < 0 or plan.revision < 0:
        yield f"version {plan.version} is negative"
    if plan.generation > 0 and not plan.members:
        yield f"generation {plan.generation} names no member"
    if plan.probe and plan.probe_steps < 1:
        yield "a probe needs probe_steps of at least 1"
    if len(plan.checkpoint_request) > MAX_REQUEST_CHARS:
        yield f"the request for a checkpoint has more than {MAX_REQUEST_CHARS} characters"
    if plan.boundary.kind is BoundaryKind.STEPS and plan.boundary.every_steps < 1:
        yield "a boundary of kind steps needs every_steps of at least 1"


def _members(plan: Plan) -> Iterator[str]:
    if [member.index for member in plan.members] != list(range(len(plan.members))):
        yield "members are not listed by index 0, 1, 2, …"
    for member in plan.members:
        if bad := _numbers(member) or _layout(member.layout):
            yield f"member {member.index} {bad}"


def _numbers(member: Member) -> str:
    """Return what is wrong with a member's numbers; empty when they are sound."""
    if member.micro_batch_samples < 0:
        return f"has a micro-batch of {member.micro_batch_samples} samples"
    if member.cap_samples is not None and member.cap_samples < 0:
        return f"has a cap of {member.cap_samples} samples"
    if member.granularity_samples < 1:
        return f"has a granularity of {member.granularity_samples} samples"
    return ""


def _layout(layout: Layout) -> str:
    """Return what is wrong with a layout; empty when it is sound."""
    if layout.shards < 1:
        return f"has {layout.shards} shards"
    if layout.kind is not LayoutKind.PIPELINE and layout.cuts:
        return "is cut into stages, but is not a pipeline"
    if layout.kind is LayoutKind.REPLICATED and layout.shards != 1:
        return f"is replicated, but has {layout.shards} shards"
    again = layout.recomputing
    if again and (layout.kind is LayoutKind.SHARDED or list(again) != sorted(set(again) & set(range(layout.stages)))):
        return f"has {layout.stages} stages, of which {', '.join(map(str, again))} cannot recompute"
    if bad := _weights("state", layout.state_weights, layout, least=1):
        return bad
    if bad := _weights("sample", layout.sample_weights, layout, least=0):
        return bad
    ascending = all(before < after for before, after in pairwise((0, *layout.cuts, MAX_UNITS)))
    return "" if ascending else f"has cuts that do not ascend from 1 to at most {MAX_UNITS - 1}"


def _weights(what: str, weights: Sequence[int], layout: Layout, *, least: int) -> str:
    """Return what is wrong with the numbers that divide something among shards; empty when they are sound."""
    if not weights:
        return ""
    if layout.kind is not LayoutKind.SHARDED:
        return f"has {what} weights, but is not sharded"
    if len(weights) != layout.shards:
        return f"has {len(weights)} {what} weights for {layout.shards} shards"
    if min(weights) < least or max(weights) > MAX_WEIGHT or not sum(weights):
        return f"has {what} weights outside of {least} to {MAX_WEIGHT}, or only zeros"
    return ""


def _ranks(plan: Plan) -> Iterator[str]:
    if [rank.rank for rank in plan.ranks] != list(range(len(plan.ranks))):
        yield "ranks are not listed by rank 0, 1, 2, …"
    if len({(rank.worker, rank.local_rank) for rank in plan.ranks}) != len(plan.ranks):
        yield "a rank is named twice"
    if found := next((rank for rank in plan.ranks if rank.local_rank < 0 or not 0 <= rank.peer_port <= MAX_PORT), None):
        yield f"rank {found.rank} has local rank {found.local_rank} and peer port {found.peer_port}"
    if unknown := next((rank for rank in plan.ranks if not 0 <= rank.member < len(plan.members)), None):
        yield f"rank {unknown.rank} is of member {unknown.member}, which the plan does not name"
    elif [rank.member for rank in plan.ranks] != sorted(rank.member for rank in plan.ranks):
        yield "ranks are not listed member by member"
    else:
        for member, ranks in zip(plan.members, plan.ranks_by_member, strict=True):
            yield from _places(member, ranks)
    named = {rank.worker for rank in plan.ranks}
    if len(set(plan.spares)) != len(plan.spares) or not named.isdisjoint(plan.spares):
        yield "a spare is named twice, or is in a member"


def _places(member: Member, ranks: Sequence[Rank]) -> Iterator[str]:
    layout = member.layout
    if layout.shards < 1:
        return
    if len(ranks) != layout.ranks:
        yield f"member {member.index} has {len(ranks)} ranks, but its layout has {layout.ranks} places"
    elif any((rank.stage, rank.shard) != layout.place(i) for i, rank in enumerate(ranks)):
        yield f"the ranks of member {member.index} are not listed stage by stage and shard by shard"


def _vectors(plan: Plan) -> Iterator[str]:
    """Yield what is wrong with values by member."""
    for what, vector in [("shares", plan.shares), *((f"probe {i}", v) for i, v in enumerate(plan.probe))]:
        if not plan.members:
            continue
        if len(vector) != len(plan.members):
            yield f"{what} has {len(vector)} entries for {len(plan.members)} members"
        elif min(vector) < 0:
            yield f"{what} holds a negative share"
        elif sum(vector) != plan.global_batch_samples:
            yield f"{what} sums to {sum(vector)}, not to the global batch of {plan.global_batch_samples}"
    if plan.prediction is not None and len(plan.prediction.bindings) != len(plan.members):
        yield f"the prediction has {len(plan.prediction.bindings)} bindings for {len(plan.members)} members"
    if plan.prediction is not None and not plan.prediction.step_s > 0:
        yield "the prediction has a step that takes no time"
    if plan.prediction is not None and (bad := _hiccups(plan.prediction)):
        yield f"the prediction {bad}"


def _hiccups(prediction: Prediction) -> str:
    """Return what is wrong with a prediction's long steps; empty when they are sound."""
    least_s = _LEAST_S if prediction.hiccups.pause_s > 0 else 0.0
    if prediction.own_s < least_s:
        return f"has own times of {prediction.own_s} s"
    return prediction.hiccups.problem()
