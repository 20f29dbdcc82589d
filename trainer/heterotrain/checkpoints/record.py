"""The record for repeating a run: settings, versions, data and plans in force, kept next to the checkpoints.

On one kind of CPU, the same script with the same data, seed, versions and shares gives bit-identical results. The
history of plans is part of the replicated state, so it continues across resumes and changes of membership.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.uris import redacted
from heterotrain_core.version import __version__

from heterotrain.data.progress import Progress
from heterotrain.data.slices import EpochSlice, Source
from heterotrain.data.sources import Mapped
from heterotrain.identity import Identity
from heterotrain.membership.roster import Roster

_log = logging.getLogger(__name__)

KEPT_PLANS = 500
HASHED_SAMPLES = 8
FINGERPRINTED = f"the number of samples and up to {HASHED_SAMPLES} of them, evenly spread over the first epoch"


class RunRecord:
    """The history of this run's plans, and the file that contains it."""

    def __init__(self, identity: Identity, config: TrainingConfig) -> None:
        self.data: str | None = None
        """Fingerprint of the data set that this process reads; ``None`` when it has none."""
        self.phase = 0
        """Phase of the training in which it is read."""
        self._identity = identity
        self._config = config
        self._plans: list[dict[str, Any]] = []
        self._left_out = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the fingerprint of the data."""
        return {"plans": list(self._plans), "left_out": self._left_out, "data": self.data, "phase": self.phase}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore a history; log a warning when its data set differs from the current one."""
        self._plans, self._left_out = list(state["plans"]), state["left_out"]
        same = state.get("phase", 0) == self.phase
        if same and state["data"] is not None and self.data is not None and state["data"] != self.data:
            _log.warning(
                "the data set is not the one that training started with (fingerprint %s, before %s): "
                "epochs no longer cover the same samples",
                self.data[:16],
                state["data"][:16],
            )

    def note(self, roster: Roster, *, step: int) -> None:
        """Add the plan of a committed step, if it differs from the last one."""
        formation, plan = roster.formation, roster.plan
        key = (formation.generation, formation.number, plan.revision)
        if (
            self._plans
            and (self._plans[-1]["generation"], self._plans[-1]["formation"], self._plans[-1]["revision"]) == key
        ):
            return
        self._plans.append({
            "from_step": step, "generation": key[0], "formation": key[1], "revision": key[2],
            "global_batch_samples": plan.global_batch_samples, "shares": list(roster.shares),
            "micro_batches": [member.micro_batch_samples for member in roster.members],
            "probe": [list(shares) for shares in plan.probe] if roster.is_complete else [],
            "probe_steps": plan.probe_steps,
            "workers": [f"{rank.worker}/{rank.local_rank}" for rank in roster.ranks],
            "pools": [roster.plan.pool_of(rank) for rank in roster.ranks], "members": list(roster.positions),
        })  # fmt: skip
        while len(self._plans) > KEPT_PLANS:
            del self._plans[0]
            self._left_out += 1

    def file(self, progress: Progress) -> bytes:
        """Return the record as JSON, for users and programs."""
        job = {"name": self._identity.job_name, "namespace": self._identity.namespace, "uid": self._identity.job_uid}
        return json.dumps(
            {
                "job": job,
                "progress": asdict(progress),
                "seed": self._config.seed,
                "settings": asdict(self._config)
                | {"checkpoint_uri": redacted(self._config.checkpoint_uri or "") or None},
                "versions": versions(),
                "data": {
                    "sha256": self.data,
                    "of": FINGERPRINTED,
                },
                "plans_left_out": self._left_out,
                "plans": self._plans,
            },
            indent=1,
        ).encode()


def versions() -> dict[str, str]:
    """Return the versions of the software and hardware of this process."""
    found = {
        "python": platform.python_version(), "system": platform.platform(), "machine": platform.machine(),
        "heterotrain": __version__,
        "torch": str(torch.__version__), "numpy": np.__version__, "torch threads": str(torch.get_num_threads()),
    }  # fmt: skip
    if torch.cuda.is_available():
        found |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "device": torch.cuda.get_device_name(),
        }
    return found


def fingerprint(source: Source) -> str | None:
    """Return the SHA-256 of the number of samples and of a few samples; ``None`` for data that are read only in order.

    It is cheap rather than complete: it detects other data, another order of files or another preparation, but not one
    changed sample among millions. Floating-point content counts by mean and standard deviation to three digits, because
    devices of different kinds prepare the same sample with different last digits.
    """
    if not source.is_numbered or not source.samples:
        return None
    digest = hashlib.sha256(str(source.samples).encode())
    for position in looked_at(source):
        add_sample(digest, source.load(EpochSlice(0, position, position + 1)))
    return digest.hexdigest()


def looked_at(source: Source) -> list[int]:
    """Return the positions in the first epoch of the samples that are looked at; none for data read only in order."""
    samples = source.samples
    if not source.is_numbered or not samples:
        return []
    count = HASHED_SAMPLES if isinstance(source, Mapped) else 1  # further samples of a stream may open further shards
    return [samples * index // count for index in range(count)]


def add_sample(digest: Any, value: Any, floats: list[float] | None = None) -> None:
    """Add a value's type and content; for values that are neither plain nor arrays, only the type.

    With ``floats``, mean and standard deviation of floating-point tensors go there instead.
    """
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.is_floating_point() and value.numel():
            whole = value.double()
            both = [float(whole.mean()), float(whole.std(correction=0))]
            if floats is None:
                digest.update("".join(f"{each:.2e}" for each in both).encode())
            else:
                floats += both
        elif value.numel():
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        add_sample(digest, torch.from_numpy(np.ascontiguousarray(value)), floats)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            add_sample(digest, key, floats)
            add_sample(digest, value[key], floats)
    elif isinstance(value, str | bytes | int | float | None):
        digest.update(repr(value).encode())
    elif isinstance(value, Sequence):
        for item in value:
            add_sample(digest, item, floats)
