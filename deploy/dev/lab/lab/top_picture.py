"""The README's picture of `heterotrain top`: a job at 41 % that lost a spot node and has it back.

The operator's decisions, its status and its events are real, and so is the page. Nodes and seconds are simulated, as
in the tests of whole trainings: an A100, a V100 and a spot T4 with speeds of 4 : 2 : 1.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from heterotrain_cli.cluster.render import description
from heterotrain_cli.cluster.view import view_of
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.cluster_state.telemetry import MemberGauges
from heterotrain_operator.decide.decision import Decision
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from support.fake_cluster import FakeCluster, node_body, pool
from support.simulated_training import Training

from lab.cluster import REPOSITORY

PATH: Final = REPOSITORY / "docs/pictures/top.svg"
COLUMNS: Final = 100
BATCH, EPOCHS, EPOCH_SAMPLES = 448, 10, 448 * 400
CHECKPOINT_STEPS: Final = 200
LOST_AT_STEP, AWAY_STEPS, SHOWN_AT_STEP = 1490, 40, 1655
POOLS: Final = {"a100": ("3.67", 1), "v100": ("2.86", 2), "t4-spot": ("0.11", 4)}
"""Price of an hour, and seconds of a sample relative to the fastest pool."""
SAMPLE_S: Final = 0.0004
EVENTS: Final = 6


class WatchedCluster(FakeCluster):
    """A cluster that keeps the events of its job, as the API server does."""

    def __init__(self) -> None:
        pools = [
            pool(name, pricePerHour=price, capacityType="Spot" if "spot" in name else "OnDemand")
            for name, (price, _) in POOLS.items()
        ]
        super().__init__(*pools, spec={"training": {"globalBatchSize": BATCH, "epochs": EPOCHS}})
        self.job["metadata"] |= {"name": "digits", "namespace": "default"}
        self.told: list[dict[str, Any]] = []
        for name in POOLS:
            self.nodes[f"node-{name}"] = node_body(f"node-{name}", name)

    def _act(self, decision: Decision) -> None:
        super()._act(decision)
        for each in decision.events:
            kind = "Warning" if each.warning else "Normal"
            told = {"reason": each.reason, "message": each.message, "type": kind, "lastTimestamp": rfc3339(self.now_s)}
            self.told.append({"metadata": {}, **told})


class WatchedTraining(Training):
    """The training of one generation of workers, on the cluster's clock, with a loss and checkpoints."""

    saved: tuple[int, float] | None = None

    @property
    def now_s(self) -> float:
        """The time of a scrape."""
        return self.cluster.now_s

    def gauges(self) -> MemberGauges:
        """Return what every member exports."""
        step, time_s = self.saved or (None, None)
        loss = 0.12 + 2.2 / (1 + self.progress.steps / 60)
        return replace(super().gauges(), loss=loss, checkpoint_step=step, checkpoint_time_s=time_s)

    def step(self) -> None:
        """Commit one step, which takes its time."""
        super().step()
        self.cluster.pass_time(self.speeds.step_seconds[-1])
        if self.progress.steps % CHECKPOINT_STEPS == 0:
            self.saved = self.progress.steps, self.cluster.now_s


def generation(cluster: FakeCluster, before: WatchedTraining | None) -> WatchedTraining:
    """Return the training of the workers that the newest plan names; it goes on where the one before stopped."""
    names = [cluster.pods[each]["spec"]["nodeName"].removeprefix("node-") for each in cluster.members()]
    truth = [
        ComputeTime(per_sample_s=SAMPLE_S * POOLS[name][1], fixed_s=0.004, backward_per_sample_s=2 * SAMPLE_S
                    * POOLS[name][1], backward_fixed_s=0.004, update_s=0.004)
        for name in names
    ]  # fmt: skip
    exchange = CommunicationTime(overlapped_s=0.01, last_bucket_s=0.004, gamma=0.2)
    training = WatchedTraining(
        cluster, truth, epoch_samples=EPOCH_SAMPLES, scrape_every=20, communication=exchange, variation=0.03, seed=1
    )
    if before is not None:
        training.progress, training.job, training.saved = before.progress, before.job, before.saved
        training.speeds.go_on_from(before.speeds)
    return training


def until(training: WatchedTraining, step: int) -> WatchedTraining:
    """Train until so many steps are committed."""
    while training.progress.steps < step:
        training.step()
    return training


def text() -> str:
    """Return the picture as SVG."""
    cluster = WatchedCluster()
    cluster.start()
    training = until(generation(cluster, None), LOST_AT_STEP)
    lost = next(name for name, body in cluster.pods.items() if body["spec"].get("nodeName") == "node-t4-spot")
    node = cluster.nodes.pop("node-t4-spot")
    cluster.vanish(lost).settle()
    training = until(generation(cluster, training), LOST_AT_STEP + AWAY_STEPS)
    cluster.nodes["node-t4-spot"] = node
    cluster.settle()
    cluster.schedule().run().settle()
    until(generation(cluster, training), SHOWN_AT_STEP)
    view = view_of(cluster.job, datetime.fromtimestamp(cluster.now_s, tz=UTC))
    screen = Console(record=True, width=COLUMNS, file=io.StringIO())
    screen.print(description(view, cluster.told[-EVENTS:]))
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # no fonts from other hosts
    return screen.export_svg(title="heterotrain top digits", unique_id="top", code_format=plain)
