"""Cold start from the store: the job's own folder, the best checkpoint in it, and its state."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.uris import job_folder, redacted

from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.manifest import Manifest
from heterotrain.checkpoints.predecessor import predecessor
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.state.loads import range_in
from heterotrain.state.training import TrainState

_log = logging.getLogger(__name__)


def job_folder_uri(uri: str, identity: Identity) -> str:
    """Return the URI of the job's own folder: jobs that share a volume must not read each other's checkpoints."""
    if identity.mode is not Mode.OPERATED:
        return uri
    return job_folder(uri, namespace=identity.namespace, name=identity.job_name, uid=identity.job_uid)


def best_checkpoint(folder: CheckpointFolder) -> tuple[int, int]:
    """Return (generation, step) of the best visible checkpoint, (-1, -1) for none.

    Raises:
        UsageError: the store cannot be read.
    """
    try:
        return folder.newest_order()
    except Exception as error:
        raise UsageError(
            f"cannot look for checkpoints in {folder.storage.shown}: {redacted(str(error))}; training does not "
            "start from the beginning while there may be some. Check address, credentials and network"
        ) from error


def restore_newest(folder: CheckpointFolder, training: TrainState) -> Manifest | None:
    """Restore what this rank needs of the newest good checkpoint; return its manifest, ``None`` when there are none.

    Raises:
        UsageError: there are checkpoints, but none of them can be used.
    """
    needs = training.needs
    found = folder.load_newest(lambda entry: range_in(entry, needs))
    if found is None:
        return None
    manifest, state = found
    training.restore(state)
    _log.info("continuing from the checkpoint of step %d", manifest.step)
    return manifest


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that was restored, and whether this job wrote it."""

    manifest: Manifest
    is_own: bool


class ColdStart:
    """Where a job continues: its own newest checkpoint or, while it has none, that of an earlier job."""

    def __init__(self, own: CheckpointFolder, config: TrainingConfig, identity: Identity) -> None:
        """Look nowhere yet; ``own`` is the job's own folder."""
        self._own, self._config, self._identity = own, config, identity

    def best(self) -> tuple[int, int]:
        """Return (generation, step) of the best visible checkpoint, (-1, -1) for none.

        That of an earlier job counts as one of generation 0, which is before all of this job's own.

        Raises:
            UsageError: a store cannot be read, or there is nothing where the job is to continue.
        """
        found = best_checkpoint(self._own)
        if found >= (0, 0) or (earlier := self._earlier()) is None:
            return found
        return 0, best_checkpoint(earlier)[1]

    def load_into(self, training: TrainState) -> Restored | None:
        """Restore what this rank needs; return what was restored, ``None`` when there are no checkpoints.

        Raises:
            UsageError: there are checkpoints, but none of them can be used.
        """
        manifest = restore_newest(self._own, training)
        if manifest is not None:
            return Restored(manifest, is_own=True)
        earlier = self._earlier()
        manifest = None if earlier is None else restore_newest(earlier, training)
        if earlier is None or manifest is None:
            self._mention_earlier()
            return None
        _log.info("that is a checkpoint of an earlier job, in %s", earlier.storage.shown)
        return Restored(manifest, is_own=False)

    def _mention_earlier(self) -> None:
        """Log that a job of the same name has left checkpoints, which a user may have expected to be used."""
        uri, who = self._config.checkpoint_uri, self._identity
        if uri is None or who.mode is not Mode.OPERATED or self._config.checkpoint_resume_from is not None:
            return
        with contextlib.suppress(UsageError):  # the start of this job does not depend on it
            if (found := predecessor(who.job_name, uri, who)) is not None:
                _log.warning(
                    "training begins, and an earlier job of this name has left checkpoints in %s: to continue from "
                    "them, set checkpoint.resumeFrom: %s", found.storage.shown, who.job_name,
                )  # fmt: skip

    def _earlier(self) -> CheckpointFolder | None:
        source, uri = self._config.checkpoint_resume_from, self._config.checkpoint_uri
        return None if source is None or uri is None else predecessor(source, uri, self._identity)
