"""Cold start from the store: the job's own folder, the best checkpoint in it, and its state."""

from __future__ import annotations

import logging

from heterotrain_core.uris import redacted

from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.manifest import Manifest
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.state.lacks import extent_in
from heterotrain.state.training import Training

_log = logging.getLogger(__name__)


def job_folder_uri(uri: str, identity: Identity) -> str:
    """Return the URI of the job's own folder: jobs that share a volume must not read each other's checkpoints."""
    if identity.mode is not Mode.OPERATED:
        return uri
    return f"{uri.rstrip('/')}/{identity.namespace}-{identity.job_name}-{identity.job_uid}"


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


def restore_newest(folder: CheckpointFolder, training: Training) -> Manifest | None:
    """Restore what this rank needs of the newest good checkpoint; return its manifest, ``None`` when there are none.

    Raises:
        UsageError: there are checkpoints, but none of them can be used.
    """
    needs = training.needs
    found = folder.load_newest(lambda entry: extent_in(entry, needs))
    if found is None:
        return None
    manifest, state = found
    training.restore(state)
    _log.info("continuing from the checkpoint of step %d", manifest.step)
    return manifest
