"""The elector in fake time: a leader stops before another operator may start."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from heterotrain_operator.kube.errors import KubeError, Unavailable
from heterotrain_operator.kube.lease import Elector, LeadershipLost, LeaseSettings
from support.fakes import FakeKube

pytestmark = pytest.mark.looptime


def an_elector(kube: FakeKube, identity: str) -> Elector:
    settings = LeaseSettings(namespace="ns", name="leader", identity=identity)
    loop = asyncio.get_running_loop()
    return Elector(kube, settings, wall_clock=lambda: "2027-01-01T00:00:00.000000Z", clock=loop.time)


async def test_one_candidate_leads_and_the_other_waits() -> None:
    kube = FakeKube()
    first, second = an_elector(kube, "first"), an_elector(kube, "second")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(120)
    assert first.leads
    assert not waiting.done()
    keeping.cancel()
    waiting.cancel()


async def test_a_released_lease_is_taken_within_a_second() -> None:
    kube = FakeKube()
    first, second = an_elector(kube, "first"), an_elector(kube, "second")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(5)
    await first.release()
    await asyncio.sleep(1.1)
    assert second.leads
    assert not first.leads
    await waiting


@pytest.mark.parametrize("hanging", [False, True])
async def test_a_leader_that_can_t_renew_stops_before_another_may_start(hanging: bool) -> None:
    """With errors, and with calls that never return."""
    kube = FakeKube()
    first, second = an_elector(kube, "first"), an_elector(kube, "second")
    await first.acquire()
    down = True

    async def hang(*_: object) -> dict[str, object]:
        await asyncio.sleep(1e6)
        return {}

    def fail(verb: str, _plural: str, _name: str) -> KubeError | None:
        return Unavailable("network down") if down and verb == "replace" and not hanging else None

    kube.fail = fail
    original = kube.replace
    if hanging:
        kube.replace = hang  # type: ignore[method-assign]  # a double
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    with pytest.raises(LeadershipLost):
        await first.keep()
    stopped_s = loop.time() - started_s
    assert not first.leads
    assert stopped_s < LeaseSettings(namespace="", name="", identity="").duration_s
    down = False
    kube.replace = original  # type: ignore[method-assign]  # restored
    await second.acquire()
    assert loop.time() - started_s > stopped_s


async def test_another_holder_of_the_lease_ends_leadership_at_the_next_renewal() -> None:
    kube = FakeKube()
    first = an_elector(kube, "first")
    await first.acquire()
    kube.objects["leases", "ns", "leader"]["metadata"]["resourceVersion"] = "9999"
    with pytest.raises(LeadershipLost, match="another operator"):
        await first.keep()


async def test_a_candidate_waits_for_the_api_server() -> None:
    kube = FakeKube()
    kube.fail = lambda *_: Unavailable("not yet")
    first = an_elector(kube, "first")
    waiting = asyncio.create_task(first.acquire())
    await asyncio.sleep(60)
    assert not waiting.done()
    kube.fail = lambda *_: None
    await asyncio.sleep(2)
    assert first.leads
    with suppress(KubeError):
        await waiting


@pytest.mark.parametrize("delay_s", [5.0])
async def test_an_api_server_that_takes_five_seconds_does_not_depose_the_leader(delay_s: float) -> None:
    kube = FakeKube()
    first, second = an_elector(kube, "first"), an_elector(kube, "second")
    await first.acquire()
    original = kube.replace

    async def slow(*arguments: object) -> dict[str, object]:
        await asyncio.sleep(delay_s / 2)
        answer = await original(*arguments)  # type: ignore[arg-type]  # passed on
        await asyncio.sleep(delay_s / 2)
        return answer

    kube.replace = slow  # type: ignore[method-assign]  # a double
    keeping, waiting = asyncio.create_task(first.keep()), asyncio.create_task(second.acquire())
    await asyncio.sleep(600)
    assert first.leads
    assert not waiting.done()
    keeping.cancel()
    waiting.cancel()


async def test_a_renewal_whose_answer_is_late_does_not_prolong_leadership() -> None:
    """It reaches the API server at once, so that others count from then; only its answer takes nearly the deadline."""
    kube = FakeKube()
    first, second = an_elector(kube, "first"), an_elector(kube, "second")
    await first.acquire()
    loop, original, calls = asyncio.get_running_loop(), kube.replace, 0

    async def late(*arguments: object) -> dict[str, object]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise Unavailable("network down")
        answer = await original(*arguments)  # type: ignore[arg-type]  # passed on
        await asyncio.sleep(first._settings.deadline_s - first._settings.renew_s - 0.1)
        return answer

    kube.replace = late  # type: ignore[method-assign]  # a double
    keeping = asyncio.create_task(first.keep())
    await asyncio.sleep(first._settings.renew_s + 0.1)
    taken = asyncio.create_task(second._try_acquire())
    await taken  # the second candidate observes the renewal
    observed_s = loop.time()
    with pytest.raises(LeadershipLost):
        await keeping
    assert loop.time() < observed_s + first._settings.duration_s
