"""When checkpoints are written, by whom, and what a fresh start takes from them.

The state is the same on every rank, so the writer needs nobody's leave: its own clock decides. Who writes follows from
the plan: the lowest rank on on-demand capacity, else the lowest rank.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.plan import Plan

from heterotrain.checkpoint import CheckpointFolder, CheckpointWriter, Manifest
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.membership import Formed
from heterotrain.report import Report
from heterotrain.training import Training

_log = logging.getLogger(__name__)


def writer_among(plan: Plan, plan_ranks: tuple[int, ...]) -> int | None:
    """Return the plan rank that writes checkpoints: on-demand first, since it is the least likely to vanish."""
    return min(plan_ranks, key=lambda rank: (not plan.members[rank].on_demand, rank), default=None)


class CheckpointKeeper:
    """This rank's part in keeping checkpoints."""

    def __init__(self, identity: Identity, config: TrainingConfig, *, report: Report) -> None:
        self._every_s = config.checkpoint_every_s
        self._report = report
        self._folder: CheckpointFolder | None = None
        self._writer: CheckpointWriter | None = None
        self._last_s = time.monotonic()
        self._wanted = threading.Event()
        if config.checkpoint_uri is not None:
            folder = folder_of(config.checkpoint_uri, identity)
            self._folder = CheckpointFolder(folder, keep=config.checkpoint_keep)
            self._writer = CheckpointWriter(self._folder, on_done=self._on_done)

    def best(self) -> tuple[int, int]:
        """Return (generation, step) of the best checkpoint that this rank can see, (-1, -1) for none."""
        manifests = self._folder.manifests() if self._folder else []
        return manifests[0].order if manifests else (-1, -1)

    def load_into(self, training: Training) -> bool:
        """Restore the newest good checkpoint; ``False`` when there is none."""
        found = self._folder.load_newest() if self._folder else None
        if found is None:
            return False
        manifest, state = found
        training.restore(state)
        _log.info("continuing from the checkpoint of step %d", manifest.step)
        return True

    def want(self) -> None:
        """Ask for a checkpoint at the next step boundary, whoever is the writer then."""
        self._wanted.set()

    def maybe_write(self, formed: Formed, training: Training) -> None:
        """Start a checkpoint when this rank is the writer and one is due."""
        if self._writer is None or not self._is_writer(formed):
            self._wanted.clear()
            return
        due = time.monotonic() - self._last_s >= self._every_s
        if (due or self._wanted.is_set()) and not self._writer.busy:
            self._start(training, generation=formed.roster.formation.generation)

    def write_now(self, training: Training, *, generation: int) -> None:
        """Write a checkpoint and return when it is complete, unless there is one of this step already."""
        if self._writer is None or not training.has_state:
            return
        self._writer.wait()
        if self.best()[1] != training.progress.steps:
            self._start(training, generation=generation)
            self._writer.wait()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._writer is not None:
            self._writer.wait()

    def write_final(self, formed: Formed, training: Training) -> None:
        """Keep the final state; on the writer this returns when it is complete."""
        if self._is_writer(formed):
            self.write_now(training, generation=formed.roster.formation.generation)

    def _is_writer(self, formed: Formed) -> bool:
        roster = formed.roster
        return writer_among(roster.plan, roster.plan_ranks) == roster.plan_ranks[formed.rank]

    def _start(self, training: Training, *, generation: int) -> None:
        if self._writer is None:
            return
        self._wanted.clear()
        self._last_s = time.monotonic()
        pause_s = self._writer.start(training.capture(), generation=generation, step=training.progress.steps)
        self._report.gauges({names.CHECKPOINT_PAUSE: pause_s})

    def _on_done(self, manifest: Manifest | None, seconds: float) -> None:
        if manifest is None:
            self._report.count(names.CHECKPOINT_FAILURES)
            return
        self._report.gauges({
            names.CHECKPOINT_STEP: float(manifest.step), names.CHECKPOINT_TIME: manifest.written_unix_s,
            names.CHECKPOINT_DURATION: seconds,
        })  # fmt: skip
        _log.info("checkpoint of step %d is complete after %.2f s", manifest.step, seconds)


def folder_of(uri: str, identity: Identity) -> Path:
    """Return the job's own folder under the URI: two jobs that share a volume must not read each other's.

    Raises:
        UsageError: the URI is of a kind that is not supported.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        raise UsageError(f"checkpoint URI {uri!r}: only file:///… is supported")
    base = Path(parts.path if parts.scheme else uri)
    if identity.mode is not Mode.OPERATED:
        return base
    return base / f"{identity.namespace}-{identity.job_name}-{identity.job_uid}"
