"""The newest complete checkpoint that this rank knows of, and what users are told about it."""

from __future__ import annotations

import contextlib

from heterotrain_core.contract import metrics as names
from heterotrain_core.uris import redacted

from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.manifest import Manifest
from heterotrain.checkpoints.storage import call_with_timeout
from heterotrain.telemetry.report import RankMetrics

HANG_S = 300.0
"""At the job's end, a store that finishes nothing for so long is not waited for. A slow one is, as long as it takes."""

Order = tuple[int, int, int]
"""``Progress.order``: steps, and steps and epochs whose hooks have run."""


class KeptCheckpoint:
    """The newest checkpoint.

    Attributes:
        newest: step and time, in seconds since 1970, of the newest one that this rank wrote or restored.
        order: of the last one of this job; -1 for none.
        failure: why the last attempt failed; empty after a success.
    """

    def __init__(self, folder: CheckpointFolder | None, report: RankMetrics) -> None:
        """Know of none in the folder; ``None`` for a job without checkpoints."""
        self.newest: tuple[int, float] | None = None
        self.order: Order = (-1, -1, -1)
        self.failure = ""
        self._folder, self._report = folder, report

    def completed(self, manifest: Manifest, order: Order) -> None:
        """Note a complete checkpoint of this job."""
        self.order, self.newest = order, (manifest.step, manifest.written_unix_s)
        saved = {names.CHECKPOINT_STEP: float(manifest.step), names.CHECKPOINT_TIME: manifest.written_unix_s}
        self._report.gauges(saved)

    def has(self, order: Order, *, within_s: float | None) -> bool:
        """Return whether a checkpoint of this progress is complete, regardless of its writer."""
        if self._folder is None or self.order == order:
            return True
        with contextlib.suppress(Exception):  # any error of a store's library: then it is written once more
            newest = call_with_timeout(HANG_S if within_s is None else max(0.0, within_s), self._folder.newest)
            if newest is not None and (newest.step, *newest.hooks) == order:
                self.completed(newest, order)
                return True
        return False

    def missing(self, order: Order, idle_s: float | None) -> str:
        """Return why there is no complete checkpoint of this progress; empty if there is one.

        ``idle_s``: seconds for which a write that still runs has finished nothing; ``None`` if none runs.
        """
        if self.order == order:
            return ""
        why = redacted(self.failure) if idle_s is None else f"its store did nothing for {idle_s:.0f} s"
        newest = f"the newest one is of step {self.order[0]}" if self.order[0] >= 0 else "this process wrote no other"
        return f"the checkpoint of the final state is missing ({why or 'it was not written'}); {newest}"

    def where_it_is(self, steps: int) -> str:
        """Return where the checkpoint of this many steps is, as the end of a sentence; empty without one."""
        if self._folder is None or self.newest is None or self.newest[0] != steps:
            return ""
        return f"; its checkpoint is in {self._folder.storage.shown}"

    def how_to_continue(self, steps: int) -> str:
        """Return where the checkpoint of this many steps is, and how a later run continues from it."""
        if self._folder is None:
            return "nothing is saved without a checkpoint_uri in heterotrain.init, so the next run begins again"
        shown = self._folder.storage.shown
        if self.newest is not None and self.newest[0] == steps:
            return f"its checkpoint is in {shown}, and the same command continues from there"
        return f"the same command continues from the newest checkpoint in {shown}"
