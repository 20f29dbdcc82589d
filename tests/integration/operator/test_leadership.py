"""The Lease on a real API server: one leader, a quick hand-over at a planned end, and a deposed leader that stops."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest
from heterotrain_operator.cluster_state.parse import rfc3339_micro
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.lease import Elector, LeadershipLost, LeaseSettings
from heterotrain_operator.kube.resources import LEASES


def an_elector(
    kube: KubeClient, namespace: str, identity: str, *, duration_s: float = 60.0, renew_s: float = 0.2
) -> Elector:
    settings = LeaseSettings(
        namespace=namespace, name="leader", identity=identity, duration_s=duration_s, renew_s=renew_s,
        deadline_s=duration_s * 0.9,
    )  # fmt: skip
    return Elector(kube, settings, wall_clock=lambda: rfc3339_micro(time.time()))


async def acquires(elector: Elector, *, within_s: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await elector.acquire()
    return elector.leads


async def test_only_one_leads_and_a_planned_end_hands_over_at_once(kube: KubeClient, namespace: str) -> None:
    # A release that takes longer than a renewal's distance is given up, and the Lease expires.
    first, second = (an_elector(kube, namespace, name, renew_s=30.0) for name in ("first", "second"))
    assert await acquires(first, within_s=30)
    keeping = asyncio.create_task(first.keep())
    assert not await acquires(second, within_s=1)
    keeping.cancel()
    await first.release()
    assert not first.leads
    assert await acquires(second, within_s=30)


async def test_a_silent_leader_is_replaced_when_its_lease_has_expired(kube: KubeClient, namespace: str) -> None:
    first, second = (an_elector(kube, namespace, name, duration_s=5.0) for name in ("first", "second"))
    assert await acquires(first, within_s=30)
    assert not await acquires(second, within_s=1)
    assert await acquires(second, within_s=60)
    lease = await kube.get(LEASES, namespace, "leader")
    assert lease["spec"]["holderIdentity"] == "second"
    assert lease["spec"]["leaseTransitions"] == 1


async def test_a_deposed_leader_notices_at_its_next_renewal(kube: KubeClient, namespace: str) -> None:
    first = an_elector(kube, namespace, "first")
    assert await acquires(first, within_s=30)
    lease = await kube.get(LEASES, namespace, "leader")
    lease["spec"]["holderIdentity"] = "thief"
    await kube.replace(LEASES, lease)
    with pytest.raises(LeadershipLost):
        await asyncio.wait_for(first.keep(), timeout=30)
    assert not first.leads
