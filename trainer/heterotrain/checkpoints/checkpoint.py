"""Checkpoints: parts and a manifest, verified on load; a failed write never damages earlier checkpoints.

The state's tensors are cut into parts, which are safetensors files (``part``); one rank writes them all, or each rank
its own. The manifest says where every tensor is. It is written last and holds the size and SHA-256 of every file, so a
checkpoint without a matching manifest does not exist. A checkpoint can be read whole, or by the elements that a rank
needs, whichever ranks have written it.

File names contain generation, step and a random mark. So no write touches the files of another, and a writer that its
peers have given up cannot overwrite files of its successors. Old checkpoints are removed only after a newer one is
complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from heterotrain.checkpoints import part as parts_of_state
from heterotrain.checkpoints.manifest import (
    Label,
    Manifest,
    WrittenPart,
    decode_manifest,
    decode_part,
    encode_manifest,
    encode_part,
    label_of,
    order_of,
)
from heterotrain.checkpoints.storage import CHUNK_BYTES, DamagedFileError, Storage, with_retries
from heterotrain.errors import UsageError
from heterotrain.state.memory import memory_of
from heterotrain.state.ranges import TensorRange
from heterotrain.state.tensors import Entry, Flat, empty, merged, unflatten

_log = logging.getLogger(__name__)

READERS = 8
"""Parts read at the same time."""
RECORD = "reproducibility.json"
MOST_JSON_BYTES = 1 << 30
"""A manifest has some hundred bytes for each tensor and part."""


class CheckpointFolder:
    """The checkpoints of one job."""

    def __init__(self, uri: str | Path, *, max_to_keep: int, shared: bool = False) -> None:
        """Keep the newest ``max_to_keep`` checkpoints, at least one.

        ``shared``: whether others may write to the folder above this one, so that it must not be a symbolic link.
        """
        self.storage = Storage(str(uri), shared=shared)
        self._max_to_keep = max(1, max_to_keep)

    # -- writing -----------------------------------------------------------------------------------------------------

    def write_part(
        self,
        label: Label,
        ranges: Sequence[tuple[Entry, TensorRange]],
        data: torch.Tensor,
        *,
        index: int,
        count: int,
        skeleton: bytes = b"",
    ) -> WrittenPart:
        """Write part ``index`` of ``count`` and, next to it, its entry for the manifest; earlier checkpoints stay.

        Args:
            label: the attempt.
            ranges: the part's contents.
            data: their bytes, one after the other.
            index: number of the part.
            count: number of parts.
            skeleton: see ``WrittenPart``.

        Raises:
            OSError: it could not be written. A store's library may raise others.
        """
        header, places = parts_of_state.header_of(ranges, step=label.step)
        stored = self.storage.put(label.part(index, count), [header, memory_of(data)])
        written = WrittenPart(
            name=stored.name, size_bytes=stored.size_bytes, sha256=stored.sha256, places=places, skeleton=skeleton
        )
        if count > 1:
            self.storage.put(label.part(index, count, ending="json"), [encode_part(written)])
        return written

    def parts_there(self, label: Label, count: int) -> list[WrittenPart] | None:
        """Return all ``count`` parts of an attempt once every one of them is written, else ``None``.

        Raises:
            ValueError: an entry is not that of its part.
            OSError: the store cannot be read. A store's library may raise others.
        """
        wanted = [label.part(index, count, ending="json") for index in range(count)]
        if not set(wanted) <= set(self.storage.names()):
            return None
        texts = [self.storage.get(name, most_bytes=MOST_JSON_BYTES) for name in wanted]
        return [decode_part(label.part(index, count), text) for index, text in enumerate(texts)]

    def complete(
        self,
        label: Label,
        skeleton: bytes,
        parts: Sequence[WrittenPart],
        *,
        now_s: float,
        record: bytes | None = None,
        hooks: tuple[int, int] = (-1, -1),
    ) -> Manifest:
        """Complete a checkpoint whose parts are written, then remove checkpoints that need not be kept.

        Args:
            label: the attempt.
            skeleton: skeleton of the state, where every rank holds all of it.
            parts: every part, in order.
            now_s: seconds since 1970.
            record: content of ``RECORD``, a file kept next to the newest checkpoint; ``None`` for none.
            hooks: see ``Manifest``.

        Raises:
            OSError: see ``write_part``.
        """
        divided = [part.skeleton for part in parts if part.skeleton]
        stored = self.storage.put(label.skeleton, [merged(divided) if divided else skeleton])
        if record is not None:
            self.storage.put(RECORD, [record], scratch=f".{label.part(0, 0, ending='json')}")
        manifest = Manifest(
            generation=label.generation, step=label.step, skeleton=stored, parts=tuple(parts), written_unix_s=now_s,
            hooks=hooks,
        )  # fmt: skip
        self.storage.put(label.manifest, [encode_manifest(manifest)])
        try:
            self._prune()
        except Exception as error:  # noqa: BLE001  # any error of a store's library: the checkpoint itself is complete
            _log.warning("old checkpoints could not be removed: %s", error)
        return manifest

    def discard(self, label: Label) -> None:
        """Remove the files of an attempt, as far as the store permits."""
        try:
            self.storage.remove(name for name in self.storage.names() if name.lstrip(".").startswith(label.stem))
        except Exception as error:  # noqa: BLE001  # any error of a store's library: left files are pruned later
            _log.info("files of a failed checkpoint could not be removed: %s", error)

    # -- reading -----------------------------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        """Return the manifests in the folder, newest first; unreadable ones are skipped.

        Raises:
            OSError: the store cannot be read. A store's library may raise others.
        """
        return [manifest for name in self._manifest_names() if (manifest := self._manifest(name)) is not None]

    def newest_order(self) -> tuple[int, int]:
        """Return (generation, step) of the newest checkpoint with a manifest, (-1, -1) for none.

        Raises:
            OSError: the store cannot be read. A store's library may raise others.
        """
        newest = self.newest()
        return (-1, -1) if newest is None else newest.order

    def newest(self) -> Manifest | None:
        """Return the newest readable manifest, ``None`` for none.

        Raises:
            OSError: the store cannot be read. A store's library may raise others.
        """
        found = (self._manifest(name) for name in with_retries(self._manifest_names))
        return next((manifest for manifest in found if manifest is not None), None)

    def load_newest(
        self, range_of: Callable[[Entry], TensorRange | None] = lambda entry: entry.whole
    ) -> tuple[Manifest, dict[str, Any]] | None:
        """Return the newest checkpoint whose data match their checksums, or ``None`` when there are no checkpoints.

        ``range_of`` is that of ``load``.

        Raises:
            UsageError: there are checkpoints, but none can be read. The user has to decide whether to start over.
            OSError: the store cannot be read. A store's library may raise others.
        """
        names = with_retries(self._manifest_names)
        for name in names:
            manifest = self._manifest(name)
            if manifest is None:
                continue
            try:
                return manifest, with_retries(partial(self.load, manifest, range_of))
            except Exception as error:  # noqa: BLE001  # any error of a store's library: an older one may be good
                _log.warning("checkpoint of step %d is skipped: %s", manifest.step, error)
        if names:
            raise UsageError(
                f"none of the {len(names)} checkpoints in {self.storage.shown} can be read: they are damaged, or "
                "another version wrote them. To start training from the beginning, move them away"
            )
        return None

    def select(self, step: int | None = None) -> Manifest:
        """Return the manifest of the newest checkpoint, or of the newest one of ``step``; never an older one instead.

        Raises:
            UsageError: there is no such checkpoint, or its manifest is damaged.
            OSError: the store cannot be read. A store's library may raise others.
        """
        steps = {name: label.step for name in self._manifest_names() if (label := label_of(name))}
        named = next((name for name, of in steps.items() if step in (None, of)), None)
        if named is None:
            shown, known = self.storage.shown, sorted(set(steps.values()))
            raise UsageError(
                f"{shown} has no checkpoint of step {step}: choose one of the steps {known}"
                if known
                else f"{shown} holds no checkpoint: name a job's own folder, which has the form namespace-name-uid"
            )
        manifest = self._manifest(named)
        if manifest is None:
            raise UsageError(
                f"the manifest of the checkpoint of step {steps[named]} in {self.storage.shown} is damaged: choose "
                "another step"
            )
        return manifest

    def load(
        self, manifest: Manifest, range_of: Callable[[Entry], TensorRange | None] = lambda entry: entry.whole
    ) -> dict[str, Any]:
        """Return a checkpoint's state, or a part of it; its files are read in parallel.

        Args:
            manifest: the checkpoint.
            range_of: the elements of a tensor to read; ``None`` leaves the tensor out.

        Raises:
            DamagedFileError: a file differs from its manifest entry, or a tensor is missing.
            OSError: a file cannot be read. A store's library may raise others.
        """
        flat = empty(self.storage.get_checked(manifest.skeleton), range_of)
        wanted = _read_plan(flat, manifest)

        def read(number: int) -> None:
            if wanted[number]:
                stored = manifest.parts[number]
                self.storage.get_into(stored, _with_gaps(wanted[number], stored.size_bytes))

        with ThreadPoolExecutor(READERS) as pool:
            for _ in pool.map(read, range(len(manifest.parts))):
                pass
        return unflatten(flat)

    # -- small things ------------------------------------------------------------------------------------------------

    def _manifest_names(self) -> list[str]:
        return sorted((name for name in self.storage.names() if label_of(name)), reverse=True)

    def _manifest(self, name: str) -> Manifest | None:
        try:
            return decode_manifest(name, with_retries(partial(self.storage.get, name, most_bytes=MOST_JSON_BYTES)))
        except Exception as error:  # noqa: BLE001  # any error of a store's library, or an invalid manifest
            _log.warning("checkpoint manifest %s is skipped: %s", name, error)
            return None

    def _prune(self) -> None:
        """Remove checkpoints that need not be kept, and files that failed writers have left behind."""
        found = self.manifests()
        last_hooks: dict[tuple[int, int], tuple[int, int]] = {}
        for each in found:
            last_hooks[each.order] = max(each.hooks, last_hooks.get(each.order, each.hooks))
        outdated = tuple(each.stem for each in found if each.hooks < last_hooks[each.order])
        kept = [each for each in found if each.stem not in outdated][: self._max_to_keep]
        needed = {name for manifest in kept for name in manifest.files}
        self.storage.remove(
            name
            for name in self.storage.names()
            if (order := order_of(name))
            and name not in needed
            and (order < kept[-1].order or name.lstrip(".").startswith(outdated))
        )


Wanted = list[tuple[int, memoryview]]
"""Memory to fill, with the place of its first byte in a part's file, in order."""


def _read_plan(flat: Flat, manifest: Manifest) -> list[Wanted]:
    """Return what to read of each part.

    Raises:
        DamagedFileError: the parts lack something, or have something outside of a tensor.
    """
    wanted: list[Wanted] = [[] for _ in manifest.parts]
    missing: dict[str, tuple[TensorRange, ...]] = {
        held.entry.name: (held.own,) for held in flat.held if held.own.elements
    }
    for part, memories in zip(manifest.parts, wanted, strict=True):
        for there, at in part.places.items():
            held = flat.by_name.get(there.name)
            common = None if held is None else held.own.common(there)
            if held is None or common is None:
                continue
            if not held.entry.whole.has(there):
                raise DamagedFileError(f"elements of {there.name} are outside of it")
            place = at + (common.start - there.start) * held.entry.dtype.itemsize
            memories.append((place, memory_of(held.values_in(common))))
            left = missing.get(there.name, ())
            missing[there.name] = tuple(rest for each in left for rest in each.without(common))
    absent = [name for name, left in missing.items() if left]
    if absent:
        raise DamagedFileError(f"{len(absent)} tensors are not complete in it, {absent[0]} among them")
    return [sorted(each, key=lambda pair: pair[0]) for each in wanted]


def _with_gaps(wanted: Wanted, size_bytes: int) -> Iterator[memoryview]:
    """Yield memory for a whole file: what is not wanted is read, too, because the checksum is that of the file."""
    scratch, reached = memoryview(bytearray(min(CHUNK_BYTES, size_bytes))), 0
    for at, memory in (*wanted, (size_bytes, memoryview(b""))):
        if reached > at:
            raise DamagedFileError("ranges of its tensors overlap")
        while reached < at:
            step = min(len(scratch), at - reached)
            yield scratch[:step]
            reached += step
        yield memory
        reached += len(memory)
