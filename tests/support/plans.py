"""Plans for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from heterotrain_core.contract.codec import Refused, decode_plan
from heterotrain_core.contract.plan import Layout, Member, Plan, Rank


def replicas(
    shares: Sequence[int], *, rank: dict[str, Any] | None = None, **fields: Any
) -> tuple[tuple[Member, ...], tuple[Rank, ...]]:
    """Return one replicated member with one rank for each share, on pods w0, w1 and so on.

    Args:
        shares: samples by member.
        rank: further fields of every rank.
        fields: further fields of every member.
    """
    return members_with([Layout()] * len(shares), shares, rank=rank, **fields)


def members_with(
    layouts: Sequence[Layout], shares: Sequence[int], *, rank: dict[str, Any] | None = None, **fields: Any
) -> tuple[tuple[Member, ...], tuple[Rank, ...]]:
    """Return members with these layouts, each rank on a pod of its own: w0, w1 and so on."""
    members = tuple(
        Member(**{"index": index, "pool": "pool", "share_samples": share, "layout": layout} | fields)
        for index, (layout, share) in enumerate(zip(layouts, shares, strict=True))
    )
    places = [(index, *layout.place(i)) for index, layout in enumerate(layouts) for i in range(layout.ranks)]
    ranks = tuple(
        Rank(
            **{
                "rank": number,
                "member": member,
                "stage": stage,
                "shard": shard,
                "worker": f"w{number}",
                "worker_uid": f"u{number}",
                "address": "127.0.0.1",
                "peer_port": 1,
                "on_demand": True,
            }
            | (rank or {})
        )
        for number, (member, stage, shard) in enumerate(places)
    )
    return members, ranks


def plan_of(shares: Sequence[int], *, layouts: Sequence[Layout] | None = None, **fields: Any) -> Plan:
    """Return a plan of the job ``j`` with these shares, of replicated members unless layouts are given."""
    members, ranks = members_with(layouts or [Layout()] * len(shares), shares)
    base = {"job_uid": "j", "generation": 1, "revision": 0, "members": members, "ranks": ranks}
    return Plan(**{**base, "global_batch_samples": sum(shares)} | fields)


def complete(text: str) -> dict[str, Any]:
    """Return a plan's JSON with the fields that its writer left out because they have their default.

    Text that is no plan of a job is returned as it is: a test may have damaged it.
    """
    raw: dict[str, Any] = json.loads(text)
    if "job_uid" not in raw:
        return raw
    plan = decode_plan(text, job_uid=raw["job_uid"])
    assert not isinstance(plan, Refused), plan.reason
    found: dict[str, Any] = json.loads(json.dumps({"schema": raw["schema"], **asdict(plan)}))
    return found
