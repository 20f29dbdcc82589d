"""The checkpoints of an earlier job, from which a job continues while it has none of its own.

An earlier job is named by its folder or by its name. A name stands for the newest folder of such a job in this job's
own namespace. The record in a folder says whose it is, and that of another namespace is never read: names of
namespaces and jobs are joined by hyphens in the folder's name, so that alone could be that of two jobs.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any, Final

from heterotrain_core.uris import redacted

from heterotrain.checkpoints.checkpoint import RECORD, CheckpointFolder
from heterotrain.checkpoints.storage import Storage, with_retries
from heterotrain.errors import UsageError
from heterotrain.identity import Identity

_log = logging.getLogger(__name__)

MOST_RECORD_BYTES: Final = 64 << 20
_UID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OF_A_JOB: Final = re.compile(rf"-{_UID.pattern}$")
"""The end of the name of a folder that an operated job has made."""
LOCAL: Final = "local"
"""Uid in the record of a run without an operator, which has no namespace."""


def predecessor(resume_from: str, uri: str, identity: Identity) -> CheckpointFolder | None:
    """Return the folder to continue from; ``None`` where a job names itself and there is none, as for its first start.

    Args:
        resume_from: URI of a folder, or name of a job.
        uri: where this job's own folder is.
        identity: of this rank.

    Raises:
        UsageError: there are no checkpoints, they are those of another namespace, or the store cannot be read.
    """
    try:
        if "://" in resume_from:
            return _named_folder(resume_from, identity)
        return _folder_of(resume_from, uri, identity)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"cannot look for the checkpoints of checkpoint.resumeFrom ({redacted(str(error))}): check address, "
            "credentials and network"
        ) from error


def _named_folder(uri: str, identity: Identity) -> CheckpointFolder:
    folder = CheckpointFolder(uri, max_to_keep=1)
    if folder.newest() is None:
        raise UsageError(
            f"{folder.storage.shown} in checkpoint.resumeFrom holds no checkpoint: name a job's own folder, which has "
            "the form namespace-name-uid, or remove the field"
        )
    owner, advice = _owner(folder), f"to move them, copy the folder to another name, without {RECORD}"
    if owner is None:
        raise UsageError(
            f"{RECORD} in {folder.storage.shown} cannot be read, so it is unknown whose they are: {advice}"
        )
    if owner.get("uid", LOCAL) != LOCAL and owner.get("namespace") != identity.namespace:
        raise UsageError(
            f"the checkpoints in {folder.storage.shown} are those of namespace {str(owner.get('namespace'))[:64]}: a "
            f"job continues from its own namespace only; {advice}"
        )
    name = uri.rstrip("/").rpartition("/")[2]
    if not owner and _OF_A_JOB.search(name) and not name.startswith(f"{identity.namespace}-"):
        raise UsageError(
            f"{folder.storage.shown} has the name of one of another namespace, and no record: a job continues from "
            f"its own namespace only; {advice}"
        )
    return folder


def _folder_of(name: str, uri: str, identity: Identity) -> CheckpointFolder | None:
    storage, prefix = Storage(uri), f"{identity.namespace}-{name}-"
    names = (each for each in with_retries(storage.names) if each.startswith(prefix))
    uids = [each.removeprefix(prefix) for each in names]
    found = []
    for uid in uids:
        if not _UID.fullmatch(uid) or uid == identity.job_uid:
            continue
        folder = CheckpointFolder(f"{uri.rstrip('/')}/{prefix}{uid}", max_to_keep=1, shared=True)
        newest, owner = folder.newest(), _owner(folder) or {}
        if newest is None:
            continue
        if (owner.get("namespace"), owner.get("name")) == (identity.namespace, name):
            found.append((newest.written_unix_s, uid, folder))
        else:
            _log.warning("%s is not used: its record does not name this namespace and job", folder.storage.shown)
    if found:
        return max(found, key=lambda each: each[:2])[2]
    if name == identity.job_name:
        return None
    raise UsageError(
        f"no job {name} of namespace {identity.namespace} has left checkpoints in {storage.shown}: correct "
        "checkpoint.resumeFrom, or remove it"
    )


def _owner(folder: CheckpointFolder) -> dict[str, Any] | None:
    """Return name, namespace and uid of the job that a folder's record names.

    They are empty without a record, and ``None`` if it cannot be read: nobody gets in by damaging it.
    """
    try:
        job = json.loads(folder.storage.get(RECORD, most_bytes=MOST_RECORD_BYTES))["job"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return job if isinstance(job, dict) and job else None
