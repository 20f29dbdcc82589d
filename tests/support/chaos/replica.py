"""One operator process in a pod: the real operator, its watches, and a kubelet that restarts it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

from heterotrain_core.contract import keys
from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.kube.errors import KubeError
from heterotrain_operator.kube.lease import LeadershipLost
from heterotrain_operator.kube.server_clock import ServerClock
from heterotrain_operator.settings import PrometheusSettings, Settings

from support.chaos.api_server import ApiServer, Body
from support.chaos.connection import ChaosClient, Link, Network
from support.chaos.telemetry import ChaosPrometheus
from support.executors import at_once

RESTART_S = 2.0


class Replica:
    """An operator that is started again whenever it ends.

    Attributes:
        network: its own network; the other replica does not share it.
        link: the connection of the present process.
        ends: why its processes ended, with their number.
        unexpected: errors that no process should end by.
    """

    def __init__(
        self,
        name: str,
        server: ApiServer,
        shared: Network,
        prometheus: ChaosPrometheus,
        rng: random.Random,
        *,
        skew_s: float,
    ) -> None:
        self.name = name
        self.network = Network()
        self.ends: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.app: App | None = None
        self._server = server
        self._shared = shared
        self._prometheus = prometheus
        self._rng = rng
        self._skew_s = skew_s
        self._killed = asyncio.Event()
        self.link = self._new_link()

    @property
    def leads(self) -> bool:
        """Whether its present process acts."""
        return self.app is not None and self.app.elector is not None and self.app.elector.leads and not self.link.dead

    def kill(self) -> None:
        """Kill the present process, without a chance to release anything."""
        self.link.dead = True
        self._killed.set()

    async def run(self) -> None:
        """Run one process after another until cancelled."""
        while True:
            self._killed.clear()
            self.link = self._new_link()
            process = asyncio.create_task(self._process())
            killed = asyncio.create_task(self._killed.wait())
            try:
                await asyncio.wait({process, killed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.link.dead = self.link.dead or process.done()
                killed.cancel()
                process.cancel()
                await asyncio.gather(process, killed, return_exceptions=True)
            self._note_end(process)
            self._note_faults()
            self.app = None
            await asyncio.sleep(RESTART_S + self._rng.uniform(0.0, 3.0))

    def _new_link(self) -> Link:
        return Link(self.name, self._server, (self._shared, self.network), self._rng, self.kill)

    async def _process(self) -> None:
        loop = asyncio.get_running_loop()
        clock = ServerClock(wall=lambda: self._server.now_s() + self._skew_s, monotonic=loop.time)
        kube = ChaosClient(self.link, clock)
        settings = Settings(
            namespace="system",
            identity=f"{self.name}-{self._rng.random()}",
            gather_s=5.0,
            prometheus=PrometheusSettings(url="http://prometheus"),  # otherwise nothing is read
        )
        clocks = Clocks(monotonic=loop.time, wall=clock.now_s, skew_s=clock.skew_s)
        app = self.app = App(kube, settings, self._prometheus, threads=at_once(), clocks=clocks)
        app.queue._jitter = lambda: self._rng.uniform(0.8, 1.2)
        await app.wait_until_served()
        async with asyncio.TaskGroup() as tasks:
            for kind, plural, deliver in (
                ("jobs", keys.PLURAL, app.events.job),
                ("pods", "pods", app.events.pod),
                ("plans", "configmaps", app.events.plan),
                ("nodes", "nodes", app.events.node),
            ):
                tasks.create_task(self._watch(app, kind, plural, deliver))
            tasks.create_task(app.run())

    async def _watch(self, app: App, kind: str, plural: str, deliver: Callable[..., None]) -> None:
        """Deliver events as kopf does: in order for each object, in any order between objects."""
        loop = asyncio.get_running_loop()
        free_s: dict[str, float] = {}

        def take(kind_of_event: str | None, body: Body) -> None:
            app.gaps.note(kind, kind_of_event, body["metadata"]["uid"])
            deliver(body, deleted=kind_of_event == "DELETED")

        async for event, body in self.link.watch(plural):
            uid = body["metadata"]["uid"]
            at_s = free_s[uid] = max(free_s.get(uid, 0.0), loop.time() + self._rng.uniform(0.0, 0.2)) + 1e-3
            loop.call_at(at_s, take, event, body)

    def _note_end(self, process: asyncio.Task[None]) -> None:
        error = None if process.cancelled() else process.exception()
        leaves = _leaves(error) if error is not None else []
        for leaf in leaves:
            self.ends[type(leaf).__name__] += 1
            if not isinstance(leaf, LeadershipLost | KubeError):
                self.unexpected.append(f"{self.name} ended by {leaf!r}")
        if not leaves:
            self.ends["killed"] += 1

    def _note_faults(self) -> None:
        if self.app is not None:
            self.unexpected += bugs_of(self.app)


def bugs_of(app: App) -> list[str]:
    """Return the unexpected errors that an operator has counted."""
    found = []
    for counter, label in ((app.metrics.internal_errors, "part"), (app.metrics.reconciles, "result")):
        for sample in (sample for metric in counter.collect() for sample in metric.samples):
            wrong = label == "part" or sample.labels.get(label) == "bug"
            if sample.name.endswith("_total") and wrong and sample.value > 0:
                found.append(f"{sample.name}{sample.labels} = {sample.value:.0f}")
    return found


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]
