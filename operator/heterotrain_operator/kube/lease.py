"""Leadership by a Lease: at most one operator acts, and one that has lost the Lease stops at once.

Time is judged by our own monotonic clock only: a Lease counts as expired when *we* have seen it unchanged for its whole
duration, so clocks of different machines need not agree. Every renewal has a deadline of its own, so that a hanging
request can't let us act beyond our time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound
from heterotrain_operator.kube.resources import LEASES
from heterotrain_operator.kube.verbs import Body, Kube


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Where the Lease is and how long it lasts.

    Attributes:
        duration_s: others wait this long after the last renewal before they take over.
        renew_s: seconds between renewals.
        deadline_s: without a successful renewal for this long, the leader gives up; well below ``duration_s``.
    """

    namespace: str
    name: str
    identity: str
    duration_s: float = 10.0
    renew_s: float = 2.0
    deadline_s: float = 7.0


class LeadershipLost(Exception):  # noqa: N818  # reads like what it says
    """Another operator may be acting by now: stop at once."""


class Elector:
    """Waits for the Lease, keeps it, and gives it back at a planned end."""

    def __init__(
        self,
        kube: Kube,
        settings: LeaseSettings,
        *,
        wall_clock: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kube = kube
        self._settings = settings
        self._wall_clock = wall_clock
        self._clock = clock
        self._sleep = sleep
        self._seen: tuple[str, str] = ("", "")
        self._seen_s = clock()
        self._held: Body | None = None

    @property
    def leads(self) -> bool:
        """Whether we hold the Lease."""
        return self._held is not None

    async def acquire(self) -> None:
        """Return as soon as the Lease is ours."""
        while True:
            try:
                if await self._try():
                    return
            except KubeError:
                pass  # the API server may be starting, too: the next try tells
            await self._sleep(self._settings.renew_s / 2)

    async def keep(self) -> None:
        """Renew for ever.

        Raises:
            LeadershipLost: somebody else holds the Lease, or it could not be renewed in time.
        """
        renewed_s = self._clock()
        while True:
            await self._sleep(self._settings.renew_s)
            try:
                async with asyncio.timeout(max(0.1, renewed_s + self._settings.deadline_s - self._clock())):
                    await self._renew()
                renewed_s = self._clock()
            except (KubeError, TimeoutError) as error:
                if isinstance(error, Conflict | NotFound):
                    self._held = None
                    raise LeadershipLost(f"somebody else took the Lease: {error}") from error
                if self._clock() - renewed_s >= self._settings.deadline_s:
                    self._held = None
                    raise LeadershipLost(
                        f"the Lease could not be renewed for {self._settings.deadline_s:.0f} s"
                    ) from error

    async def release(self) -> None:
        """Give the Lease back, so that a successor need not wait for it to expire; harmless when it is not ours."""
        if self._held is None:
            return
        held, self._held = self._held, None
        held["spec"].update({"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._wall_clock()})
        async with asyncio.timeout(self._settings.renew_s):
            await self._kube.replace(LEASES, held)

    async def _try(self) -> bool:
        settings = self._settings
        try:
            lease = await self._kube.get(LEASES, settings.namespace, settings.name)
        except NotFound:
            body = {
                "apiVersion": LEASES.api_version,
                "kind": "Lease",
                "metadata": {"name": settings.name, "namespace": settings.namespace},
                "spec": self._spec(transitions=0),
            }
            return await self._hold(self._kube.create(LEASES, body))
        spec = lease.get("spec") or {}
        holder, version = spec.get("holderIdentity") or "", lease["metadata"]["resourceVersion"]
        if (holder, version) != self._seen:
            self._seen, self._seen_s = (holder, version), self._clock()
        expired = self._clock() - self._seen_s > float(spec.get("leaseDurationSeconds") or 0)
        if holder and holder != settings.identity and not expired:
            return False
        lease["spec"] = self._spec(transitions=int(spec.get("leaseTransitions") or 0) + 1)
        return await self._hold(self._kube.replace(LEASES, lease))

    async def _hold(self, write: Awaitable[Body]) -> bool:
        try:
            self._held = await write
        except Conflict:
            return False  # somebody was faster
        return True

    async def _renew(self) -> None:
        assert self._held is not None  # noqa: S101  # keep() follows acquire()
        self._held["spec"]["renewTime"] = self._wall_clock()
        self._held = await self._kube.replace(LEASES, self._held)

    def _spec(self, *, transitions: int) -> dict[str, Any]:
        now = self._wall_clock()
        return {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": int(self._settings.duration_s),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
