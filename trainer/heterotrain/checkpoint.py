"""Checkpoints in a folder: written beside training, verified on load, never worse than what was there before.

A checkpoint is a data file and a manifest. The manifest is written last and holds the data's size and SHA-256, so a
checkpoint without a fitting manifest does not exist. Names carry generation and step: a writer that was given up by its
peers cannot overwrite what its successors wrote. Old checkpoints go only after a newer one is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from heterotrain.state import Flat, flatten, unflatten

_log = logging.getLogger(__name__)

FORMAT = 1
_NAME = re.compile(r"^checkpoint-g(\d{9})-s(\d{12})\.json$")
_ANY = re.compile(r"^\.?checkpoint-g(\d{9})-s(\d{12})(?:\.json|-[0-9a-f]{8}(?:\.pt)?)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a complete checkpoint says of itself."""

    format: int
    generation: int
    step: int
    data: str
    size_bytes: int
    sha256: str
    written_unix_s: float

    @property
    def order(self) -> tuple[int, int]:
        """Of two checkpoints the greater one is the newer: a later generation outranks a higher step."""
        return (self.generation, self.step)


class CheckpointFolder:
    """The checkpoints of one job in a folder of a file system."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path = path
        self._keep = max(1, keep)

    def write(self, state: Flat, *, generation: int, step: int, now_s: float) -> Manifest:
        """Write one checkpoint, then drop the oldest beyond what is kept.

        Raises:
            OSError: it could not be written; what was there before is untouched.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        mark = secrets.token_hex(4)  # no write ever touches another one's files, not even one of the same step
        stem = f"checkpoint-g{generation:09d}-s{step:012d}"
        scratch, data = self.path / f".{stem}-{mark}", self.path / f"{stem}-{mark}.pt"
        try:
            with scratch.open("wb") as file:
                torch.save({"skeleton": state.skeleton, "tensors": state.tensors}, file)
                file.flush()
                os.fsync(file.fileno())
            manifest = Manifest(
                format=FORMAT, generation=generation, step=step, data=data.name, size_bytes=scratch.stat().st_size,
                sha256=_sha256(scratch), written_unix_s=now_s,
            )  # fmt: skip
            scratch.replace(data)
            with scratch.open("w", encoding="utf-8") as file:
                json.dump(asdict(manifest), file)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self.path / f"{stem}.json")
            _sync_folder(self.path)
        finally:
            scratch.unlink(missing_ok=True)
        self._prune()
        return manifest

    def manifests(self) -> list[Manifest]:
        """Return what claims to be complete, newest first; broken manifests are passed over."""
        found = []
        try:
            names = os.listdir(self.path)  # noqa: PTH208 - names are all we need
        except OSError:
            return []
        for name in names:
            if _NAME.match(name):
                try:
                    raw: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
                    manifest = Manifest(**raw)
                except (OSError, ValueError, TypeError):
                    _log.warning("checkpoint manifest %s cannot be read; passed over", name)
                    continue
                if manifest.format == FORMAT:
                    found.append(manifest)
        return sorted(found, key=lambda manifest: manifest.order, reverse=True)

    def load_newest(self) -> tuple[Manifest, dict[str, Any]] | None:
        """Return the newest checkpoint whose data fit their checksum, or ``None`` when there is none."""
        for manifest in self.manifests():
            path = self.path / manifest.data
            try:
                if path.stat().st_size != manifest.size_bytes or _sha256(path) != manifest.sha256:
                    raise ValueError("its data do not fit its checksum")  # noqa: TRY301 - one place says why it is passed
                raw = torch.load(path, map_location="cpu", weights_only=True)
                return manifest, unflatten(Flat(raw["skeleton"], list(raw["tensors"])))
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                _log.warning("checkpoint of step %d is passed over: %s", manifest.step, error)
        return None

    def _prune(self) -> None:
        """Drop what is older than the checkpoints that are kept, and what writers that died have left behind."""
        kept = self.manifests()[: self._keep]
        needed = {manifest.data for manifest in kept}
        for name in os.listdir(self.path):  # noqa: PTH208 - names are all we need
            found = _ANY.match(name)
            if found is None or name in needed:
                continue
            if (int(found[1]), int(found[2])) < kept[-1].order:
                (self.path / name).unlink(missing_ok=True)


class CheckpointWriter:
    """Writes in a thread; training waits only while the state is copied."""

    def __init__(self, folder: CheckpointFolder, *, on_done: Callable[[Manifest | None, float], None]) -> None:
        """``on_done`` gets the manifest (``None`` after a failure) and the seconds that writing took."""
        self._folder = folder
        self._on_done = on_done
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, state: dict[str, Any], *, generation: int, step: int) -> float:
        """Copy the state and write it in the background; return the seconds that copying took.

        A checkpoint that is still being written is waited for first: two would compete for the same disk.
        """
        self.wait()
        began_s = time.perf_counter()
        live = flatten(state)
        copy = Flat(live.skeleton, [tensor.detach().to("cpu", copy=True) for tensor in live.tensors])
        pause_s = time.perf_counter() - began_s
        self._thread = threading.Thread(
            target=self._write, args=(copy, generation, step), name="heterotrain-checkpoint", daemon=True
        )
        self._thread.start()
        return pause_s

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, state: Flat, generation: int, step: int) -> None:
        began_s = time.perf_counter()
        try:
            manifest: Manifest | None = self._folder.write(state, generation=generation, step=step, now_s=time.time())
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            _log.error("checkpoint of step %d failed: %s", step, error)
            manifest = None
        self._on_done(manifest, time.perf_counter() - began_s)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
