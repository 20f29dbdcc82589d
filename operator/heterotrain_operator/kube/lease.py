"""Leader election by a Lease: at most one operator acts, and an operator that has lost the Lease stops at once.

As in client-go, a candidate uses only its own monotonic clock: a Lease is expired when the candidate has observed it
unchanged for its whole duration, so the clocks of different machines need not agree. Every renewal has a deadline, so
that a hanging request cannot extend leadership. The deadline counts from when the last successful renewal was sent: it
may have reached the API server at once, and only its answer may have been slow.
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

_LAST_TRY_S = 0.1
"""Least seconds for an attempt to renew the Lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Name and timing of the Lease.

    Attributes:
        duration_s: other candidates wait this long after the last renewal before they take over.
        renew_s: seconds between renewals.
        deadline_s: the leader gives up this long after it sent the last successful renewal; below ``duration_s``, and
            more than twice as long as the slowest answer that should not end leadership.
    """

    namespace: str
    name: str
    identity: str
    duration_s: float = 12.0
    renew_s: float = 2.4
    deadline_s: float = 10.8


class LeadershipLost(Exception):  # noqa: N818  # named for the event
    """Another operator may already be acting: stop at once."""


class Elector:
    """Acquires, renews and releases the Lease."""

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
        self._observed: tuple[str, str] = ("", "")
        self._observed_s = clock()
        self._lease: Body | None = None
        self._renewed_s = clock()
        """When the request was sent by which the Lease was acquired or renewed last."""

    @property
    def leads(self) -> bool:
        """Whether this operator holds the Lease."""
        return self._lease is not None

    async def acquire(self) -> None:
        """Wait until this operator holds the Lease."""
        while True:
            try:
                if await self._try_acquire():
                    return
            except KubeError:
                pass  # the API server may be starting, too
            await self._sleep(self._settings.renew_s / 2)

    async def keep(self) -> None:
        """Renew the Lease until cancelled.

        Raises:
            LeadershipLost: another operator holds the Lease, or it could not be renewed in time.
        """
        sent_s = self._renewed_s
        while True:
            until_s = self._renewed_s + self._settings.deadline_s
            await self._sleep(max(0.0, min(sent_s + self._settings.renew_s, until_s) - self._clock()))
            sent_s = self._clock()
            try:
                async with asyncio.timeout(max(_LAST_TRY_S, until_s - sent_s)):
                    await self._renew()
                self._renewed_s = sent_s
            except (KubeError, TimeoutError) as error:
                if isinstance(error, Conflict | NotFound):
                    self._lease = None
                    raise LeadershipLost(f"another operator took the Lease: {error}") from error
                if self._clock() >= until_s - _LAST_TRY_S:
                    self._lease = None
                    raise LeadershipLost(
                        f"the Lease could not be renewed for {self._settings.deadline_s:.0f} s"
                    ) from error

    async def release(self) -> None:
        """Release the Lease, so that a successor need not wait for its expiry; does nothing without the Lease."""
        if self._lease is None:
            return
        lease, self._lease = self._lease, None
        async with asyncio.timeout(self._settings.renew_s):
            try:
                await self._kube.replace(LEASES, self._released(lease))
            except Conflict:  # a renewal was on its way when it was cancelled
                lease = await self._kube.get(LEASES, self._settings.namespace, self._settings.name)
                if lease["spec"].get("holderIdentity") == self._settings.identity:
                    await self._kube.replace(LEASES, self._released(lease))

    def _released(self, lease: Body) -> Body:
        spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._wall_clock()}
        return {**lease, "spec": {**lease["spec"], **spec}}

    async def _try_acquire(self) -> bool:
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
            return await self._write(self._kube.create(LEASES, body))
        spec = lease.get("spec") or {}
        holder, version = spec.get("holderIdentity") or "", lease["metadata"]["resourceVersion"]
        if (holder, version) != self._observed:
            self._observed, self._observed_s = (holder, version), self._clock()
        expired = self._clock() - self._observed_s > float(spec.get("leaseDurationSeconds") or 0)
        if holder and holder != settings.identity and not expired:
            return False
        lease["spec"] = self._spec(transitions=int(spec.get("leaseTransitions") or 0) + 1)
        return await self._write(self._kube.replace(LEASES, lease))

    async def _write(self, call: Awaitable[Body]) -> bool:
        sent_s = self._clock()
        try:
            self._lease = await call
        except Conflict:
            return False  # another candidate was faster
        self._renewed_s = sent_s
        return True

    async def _renew(self) -> None:
        assert self._lease is not None  # noqa: S101  # keep() follows acquire()
        self._lease["spec"]["renewTime"] = self._wall_clock()
        self._lease = await self._kube.replace(LEASES, self._lease)

    def _spec(self, *, transitions: int) -> dict[str, Any]:
        now = self._wall_clock()
        return {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": int(self._settings.duration_s),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
