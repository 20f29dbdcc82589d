"""TensorBoard files: curves and events of a training, by ``torch.utils.tensorboard`` in a thread of its own.

Only the lowest rank writes. The training thread queues a few numbers and never waits for a disk. Points are at least
``GAP_S`` apart, so short steps do not cost more than long ones. When another rank becomes the lowest, or a job is
resumed, a new file begins, and TensorBoard drops the points of an abandoned attempt (``purge_step``).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from heterotrain_core.contract import metrics as names

from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.roster import Roster
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

GAP_S = 1.0
"""Seconds between two points: curves show no more detail, and each point takes the interpreter a millisecond."""
FLUSH_S = 2
"""Seconds between two flushes, the longest delay of points in the files."""
PENDING = 1000
"""Points that may wait for a slow disk; more are left out."""
CLOSE_S = 5.0
"""Time limit for writing the last points when the training ends."""

TAGS = {
    names.LOSS: "train/loss",
    names.GLOBAL_BATCH: "train/global_batch_samples",
    names.NOISE_SCALE: "train/noise_scale_samples",
    names.EPOCH: "progress/epoch",
    names.WORLD_SIZE: "progress/ranks",
    names.CHECKPOINT_STEP: "progress/checkpoint_step",
}
"""Gauges of the rank's telemetry that become curves, with their TensorBoard tags."""


class TensorBoardWriter:
    """Writes this rank's part of the job's TensorBoard files."""

    def __init__(self, folder: str, identity: Identity, *, report: RankMetrics) -> None:
        """Check the arguments; files are created with the first point.

        Args:
            folder: folder for the files; each job under an operator gets its own folder below it.
            identity: this rank, part of the names of its files.
            report: its telemetry, the source of the curves.

        Raises:
            UsageError: the library is missing, or the folder is not a path.
        """
        if importlib.util.find_spec("tensorboard") is None:
            raise UsageError("TensorBoard files need its package: run pip install 'heterotrain[tensorboard]'")
        if "://" in folder and not folder.startswith("file://"):
            raise UsageError(
                f"the TensorBoard folder {folder!r} is not a path: set a folder, in a pod one of a mounted volume"
            )
        own = f"{identity.namespace}-{identity.job_name}-{identity.job_uid}"
        base = Path(folder.removeprefix("file://"))
        self._folder = base / own if identity.mode is Mode.OPERATED else base
        self._name = f"{identity.worker}-{identity.local_rank}"
        self._report = report
        self._file: EventFile | None = None
        self._files = 0
        self._written_roster: Roster | None = None
        self._written_formation = ""
        self._written_plan = (-1, -1)
        self._last: tuple[float, float] | None = None

    def committed(self, active_group: ActiveGroup, optimizers: Sequence[torch.optim.Optimizer], *, step: int) -> None:
        """Write a point for a committed step if this is the lowest rank and the last point is ``GAP_S`` old.

        Args:
            active_group: the formation that committed the step.
            optimizers: their learning rates are written.
            step: committed steps, including this one.
        """
        if active_group.rank != 0:
            self.close()
            return
        if self._file is None:
            self._files += 1
            self._file = EventFile(self._folder, suffix=f".{self._name}.{self._files}", first_step=step)
            self._written_roster, self._written_formation, self._last = None, "", None
            atexit.register(self.close)
        if active_group.roster is not self._written_roster:
            self._events(self._file, active_group, step)
        now_s = time.perf_counter()
        if self._last is not None and now_s - self._last[0] < GAP_S:
            return
        gauges = self._report.current()
        scalars = self._curves(gauges)
        samples = gauges[names.SAMPLES_COMMITTED]
        if self._last is not None:
            scalars["train/samples_per_s"] = (samples - self._last[1]) / (now_s - self._last[0])
        self._last = (now_s, samples)
        scale = gauges.get(names.LEARNING_RATE_SCALE, 1.0)
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        for number, rate in enumerate(rates):
            scalars["train/learning_rate" + (f"_{number}" if number else "")] = float(rate) * scale
        roster = active_group.roster
        for rank, position in zip(roster.ranks, roster.positions, strict=True):
            if (rank.stage, rank.shard) == (0, 0):  # a member is named for its first rank
                scalars[f"share_samples/{rank.worker}/{rank.local_rank}"] = roster.shares[position]
        self._file.put(step, scalars)

    def close(self) -> None:
        """Write pending points and values reported since the last step; a later step begins another file."""
        file, self._file = self._file, None
        if file is not None:
            atexit.unregister(self.close)
            gauges = self._report.current()
            file.put(int(gauges[names.STEP]), self._curves(gauges))
            file.close()

    def _curves(self, gauges: Mapping[str, float]) -> dict[str, float]:
        curves = {tag: gauges[name] for name, tag in TAGS.items() if name in gauges}
        return curves | {f"script/{name}": value for name, value in self._report.reported().items()}

    def _events(self, file: EventFile, active_group: ActiveGroup, step: int) -> None:
        """Write each formation and each plan as text, once."""
        roster = active_group.roster
        formation, version = str(roster.formation), roster.plan.version
        if formation != self._written_formation:
            who = ", ".join(f"{rank.worker}/{rank.local_rank}" for rank in roster.ranks)
            file.put(step, text=f"formation {formation}: {who}")
        elif version != self._written_plan:
            why = f" ({roster.plan.reason})" if roster.plan.reason else ""
            file.put(step, text=f"plan {version[0]}.{version[1]}: shares {list(roster.shares)}{why}")
        self._written_roster, self._written_formation, self._written_plan = roster, formation, version


class EventFile:
    """A file and the thread that writes it. A failing disk causes a warning and missing curves only."""

    def __init__(self, folder: Path, *, suffix: str, first_step: int) -> None:
        """Begin a file that invalidates points from ``first_step`` on in older files of the folder."""
        self._points: queue.Queue[tuple[int, float, Mapping[str, float], str] | None] = queue.Queue(PENDING)
        self._thread = threading.Thread(
            target=self._run, args=(folder, suffix, first_step), name="heterotrain-tensorboard", daemon=True
        )
        self._thread.start()

    def put(self, step: int, scalars: Mapping[str, float] | None = None, text: str = "") -> None:
        """Queue a point and return at once: values by TensorBoard tag, and Markdown under the tag ``events``."""
        with contextlib.suppress(queue.Full):
            self._points.put_nowait((step, time.time(), scalars or {}, text))

    def close(self) -> None:
        """Wait until everything is written, for at most ``CLOSE_S``."""
        with contextlib.suppress(queue.Full):
            self._points.put_nowait(None)
        self._thread.join(CLOSE_S)

    def _run(self, folder: Path, suffix: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # optional, and half a second to load

        try:
            with SummaryWriter(folder, purge_step=first_step, filename_suffix=suffix, flush_secs=FLUSH_S) as writer:
                while (point := self._points.get()) is not None:
                    step, at_s, scalars, text = point
                    for tag, value in scalars.items():
                        writer.add_scalar(tag, value, step, at_s)
                    if text:
                        writer.add_text("events", text, step, at_s)
        except OSError as error:
            _log.warning("no more TensorBoard points are written: %s: %s", folder, error)
