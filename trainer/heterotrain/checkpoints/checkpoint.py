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

import base64
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from heterotrain.checkpoints import part as parts_of_state
from heterotrain.checkpoints.format_2 import read_plan
from heterotrain.checkpoints.part import Span
from heterotrain.checkpoints.storage import CHUNK_BYTES, DamagedFileError, Storage, StoredFile, with_retries
from heterotrain.errors import UsageError
from heterotrain.layouts.holdings import Extent, overlap
from heterotrain.state.parts import memory_of
from heterotrain.state.tensors import Entry, Flat, empty, merged, unflatten

_log = logging.getLogger(__name__)

FORMAT = 3
FORMAT_2 = 2
"""One sequence of bytes, cut into parts of equal length; still read."""
READABLE = (FORMAT_2, FORMAT)
READERS = 8
"""Parts read at the same time."""
MARK_BITS = 48
"""A mark is sent in the control vector as a float64, which represents whole numbers up to 2^53."""
SKELETON = "-skeleton.pt"
RECORD = "reproducibility.json"
_MANIFEST = re.compile(r"^checkpoint-g\d{9}-s\d{12}-[0-9a-f]{12}\.json$")
_ANY = re.compile(r"^\.?checkpoint-g(\d{9})-s(\d{12})-[0-9a-f]{12}(?:\.json|-[a-z0-9]+\.(?:bin|pt|json|safetensors))$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One attempt to write a checkpoint."""

    generation: int
    step: int
    mark: int

    @property
    def stem(self) -> str:
        """Common beginning of the names of all its files."""
        return f"checkpoint-g{self.generation:09d}-s{self.step:012d}-{self.mark:012x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Elements of a tensor in a part.

    Attributes:
        name: of the tensor in the state.
        dtype: its format, as torch calls it.
        shape: its whole shape.
        start: first element.
        stop: the element after the last one.
        part: number of the part.
        at: place of the first byte in the part's file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    part: int
    at: int


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part in the store.

    Attributes:
        file: the file.
        spans: its contents, in order.
        header_bytes: length of the file before the first of them.
        skeleton: of the state that the writer holds a part of; empty where every rank holds the whole state.
    """

    file: StoredFile
    spans: tuple[Span, ...]
    header_bytes: int
    skeleton: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a complete checkpoint.

    Attributes:
        tensors: where every tensor is; empty in format 2.
        hooks: steps and epochs whose hooks have run. Of two checkpoints of one step the greater is the newer one.
    """

    format: int
    generation: int
    step: int
    skeleton: StoredFile
    parts: tuple[StoredFile, ...]
    written_unix_s: float
    hooks: tuple[int, int] = (-1, -1)
    tensors: tuple[Located, ...] = ()

    @property
    def stem(self) -> str:
        """Common beginning of the names of all its files."""
        return self.skeleton.name.removesuffix(SKELETON)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: of two checkpoints the greater is the newer one. A later generation outranks a higher step."""
        return (self.generation, self.step)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its data files."""
        return (self.skeleton.name, *(part.name for part in self.parts))

    @property
    def size_bytes(self) -> int:
        """The size of its data files."""
        return self.skeleton.size_bytes + sum(part.size_bytes for part in self.parts)


def new_mark() -> int:
    """Return a random mark, distinct from that of any other attempt."""
    return secrets.randbits(MARK_BITS)


class CheckpointFolder:
    """The checkpoints of one job."""

    def __init__(self, uri: str | Path, *, max_to_keep: int, max_age_s: float | None = None) -> None:
        """Keep the newest ``max_to_keep`` checkpoints, none older than ``max_age_s``; the newest always stays."""
        self.storage = Storage(str(uri))
        self._max_to_keep = max(1, max_to_keep)
        self._max_age_s = max_age_s

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, state: Flat, *, generation: int, step: int, now_s: float) -> Manifest:
        """Write one checkpoint as a single part, then remove checkpoints that need not be kept.

        Args:
            state: skeleton and tensors, on any device.
            generation: generation of the formation that reached this state.
            step: committed steps.
            now_s: seconds since 1970, from which ages count.

        Raises:
            OSError: it could not be written; earlier checkpoints are untouched. A store's library may raise others.
        """
        label = Label(generation=generation, step=step, mark=new_mark())
        chosen = parts_of_state.cut(state, 0, 1)
        try:
            part = self.write_part(
                label, parts_of_state.spans_of(chosen), parts_of_state.packed(chosen, None), index=0, count=1
            )
            return self.complete(label, state.skeleton, [part], now_s=now_s)
        except BaseException:
            self.discard(label)
            raise

    def write_part(
        self,
        label: Label,
        spans: Sequence[Span],
        data: torch.Tensor,
        *,
        index: int,
        count: int,
        skeleton: bytes = b"",
    ) -> WrittenPart:
        """Write part ``index`` of ``count`` and, next to it, its entry for the manifest.

        Args:
            label: the attempt.
            spans: the part's contents.
            data: their bytes, one after the other.
            index: number of the part.
            count: number of parts.
            skeleton: see ``WrittenPart``.

        Raises:
            OSError: see ``write``.
        """
        stem = f"{label.stem}-p{index}of{count}"
        header = parts_of_state.header_of(spans, step=label.step)
        stored = self.storage.put(f"{stem}.safetensors", [header, memory_of(data)])
        written = WrittenPart(stored, tuple(spans), len(header), skeleton)
        if count > 1:
            entry = asdict(written) | {"skeleton": base64.b64encode(skeleton).decode()}
            self.storage.put(f"{stem}.json", [json.dumps(entry).encode()])
        return written

    def parts_there(self, label: Label, count: int) -> list[WrittenPart] | None:
        """Return all ``count`` parts of an attempt once every one of them is written, else ``None``.

        Raises:
            OSError: the store cannot be read. A store's library may raise others.
        """
        wanted = [f"{label.stem}-p{index}of{count}.json" for index in range(count)]
        if not set(wanted) <= set(self.storage.names()):
            return None
        return [_written_part(json.loads(self.storage.get(name))) for name in wanted]

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
            OSError: see ``write``.
        """
        divided = [part.skeleton for part in parts if part.skeleton]
        stored = self.storage.put(f"{label.stem}{SKELETON}", [merged(divided) if divided else skeleton])
        if record is not None:
            self.storage.put(RECORD, [record])
        tensors = tuple(
            Located(**asdict(span), part=number, at=at)
            for number, part in enumerate(parts)
            for span, at in parts_of_state.places(part.spans, header_bytes=part.header_bytes)
        )
        manifest = Manifest(
            format=FORMAT, generation=label.generation, step=label.step, skeleton=stored,
            parts=tuple(part.file for part in parts), written_unix_s=now_s, hooks=hooks, tensors=tensors,
        )  # fmt: skip
        self.storage.put(f"{label.stem}.json", [json.dumps(asdict(manifest)).encode()])
        try:
            self._prune(now_s)
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
        self, extent_of: Callable[[Entry], Extent | None] = lambda entry: entry.whole
    ) -> tuple[Manifest, dict[str, Any]] | None:
        """Return the newest checkpoint whose data match their checksums, or ``None`` when there are no checkpoints.

        ``extent_of`` is that of ``load``.

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
                return manifest, with_retries(partial(self.load, manifest, extent_of))
            except Exception as error:  # noqa: BLE001  # any error of a store's library: an older one may be good
                _log.warning("checkpoint of step %d is skipped: %s", manifest.step, error)
        if names:
            raise UsageError(
                f"none of the {len(names)} checkpoints in {self.storage.uri} can be read: they are damaged, or another "
                "version wrote them. To start training from the beginning, move them away"
            )
        return None

    def select(self, step: int | None = None) -> Manifest:
        """Return the manifest of the newest checkpoint, or of the newest one of ``step``; never an older one instead.

        Raises:
            UsageError: there is no such checkpoint, or its manifest is damaged.
            OSError: the store cannot be read. A store's library may raise others.
        """
        steps = {name: int(match[2]) for name in self._manifest_names() if (match := _ANY.match(name))}
        named = next((name for name, of in steps.items() if step in (None, of)), None)
        if named is None:
            there = f"there are checkpoints of the steps {sorted(set(steps.values()))}" if steps else "it has none"
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise UsageError(
                f"{self.storage.uri} has {which}: {there}. A job's own folder has a name of the form namespace-name-uid"
            )
        manifest = self._manifest(named)
        if manifest is None:
            raise UsageError(
                f"the manifest of the checkpoint of step {steps[named]} in {self.storage.uri} is damaged: choose "
                "another step"
            )
        return manifest

    def load(
        self, manifest: Manifest, extent_of: Callable[[Entry], Extent | None] = lambda entry: entry.whole
    ) -> dict[str, Any]:
        """Return a checkpoint's state, or a part of it; its files are read in parallel.

        Args:
            manifest: the checkpoint.
            extent_of: the elements of a tensor to read; ``None`` leaves the tensor out.

        Raises:
            DamagedFileError: a file differs from its manifest entry, or a tensor is missing.
            OSError: a file cannot be read. A store's library may raise others.
        """
        skeleton = bytearray(manifest.skeleton.size_bytes)
        self.storage.get_into(manifest.skeleton, [memoryview(skeleton)])
        flat = empty(bytes(skeleton), extent_of)
        wanted = read_plan(flat, len(manifest.parts)) if manifest.format == FORMAT_2 else _read_plan(flat, manifest)

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
        return sorted((name for name in self.storage.names() if _MANIFEST.match(name)), reverse=True)

    def _manifest(self, name: str) -> Manifest | None:
        try:
            raw: dict[str, Any] = json.loads(with_retries(partial(self.storage.get, name)))
            if raw["format"] not in READABLE:
                reason = f"it has format {raw['format']}, this version reads {' and '.join(map(str, READABLE))}"
                raise ValueError(reason)  # noqa: TRY301  # logged below
            skeleton, parts = StoredFile(**raw.pop("skeleton")), tuple(StoredFile(**part) for part in raw.pop("parts"))
            hooked, evaluated = raw.pop("hooks", (-1, -1))
            tensors = tuple(Located(**each | {"shape": tuple(each["shape"])}) for each in raw.pop("tensors", ()))
            return Manifest(**raw, skeleton=skeleton, parts=parts, hooks=(hooked, evaluated), tensors=tensors)
        except Exception as error:  # noqa: BLE001  # any error of a store's library, or an invalid manifest
            _log.warning("checkpoint manifest %s is skipped: %s", name, error)
            return None

    def _prune(self, now_s: float) -> None:
        """Remove checkpoints that need not be kept, and files that failed writers have left behind."""
        found = self.manifests()
        last_hooks: dict[tuple[int, int], tuple[int, int]] = {}
        for each in found:
            last_hooks[each.order] = max(each.hooks, last_hooks.get(each.order, each.hooks))
        outdated = tuple(each.stem for each in found if each.hooks < last_hooks[each.order])
        newest = [each for each in found if each.stem not in outdated][: self._max_to_keep]
        kept = [
            manifest
            for index, manifest in enumerate(newest)
            if index == 0 or self._max_age_s is None or now_s - manifest.written_unix_s <= self._max_age_s
        ]
        needed = {name for manifest in kept for name in manifest.files}
        self.storage.remove(
            name
            for name in self.storage.names()
            if (match := _ANY.match(name))
            and name not in needed
            and ((int(match[1]), int(match[2])) < kept[-1].order or name.lstrip(".").startswith(outdated))
        )


Wanted = list[tuple[int, memoryview]]
"""Memory to fill, with the place of its first byte in a part's file, in order."""


def _read_plan(flat: Flat, manifest: Manifest) -> list[Wanted]:
    """Return what to read of each part.

    Raises:
        DamagedFileError: the parts lack something.
    """
    wanted: list[Wanted] = [[] for _ in manifest.parts]
    missing = {held.entry.name: held.extent.elements for held in flat.held}
    for located in manifest.tensors:
        held = flat.by_name.get(located.name)
        common = None if held is None else overlap(held.extent, Extent(located.start, located.stop))
        if held is None or common is None:
            continue
        size = held.entry.dtype.itemsize
        memory = memory_of(held.values)[common.start * size - held.start_byte : common.stop * size - held.start_byte]
        wanted[located.part].append((located.at + (common.start - located.start) * size, memory))
        missing[located.name] -= common.elements
    absent = [name for name, elements in missing.items() if elements]
    if absent:
        raise DamagedFileError(f"{len(absent)} tensors are not complete in it, {absent[0]} among them")
    return [sorted(each, key=lambda pair: pair[0]) for each in wanted]


def _with_gaps(wanted: Wanted, size_bytes: int) -> Iterator[memoryview]:
    """Yield memory for a whole file: what is not wanted is read, too, because the checksum is that of the file."""
    scratch, reached = memoryview(bytearray(min(CHUNK_BYTES, size_bytes))), 0
    for at, memory in (*wanted, (size_bytes, memoryview(b""))):
        while reached < at:
            step = min(len(scratch), at - reached)
            yield scratch[:step]
            reached += step
        yield memory
        reached += len(memory)


def _written_part(raw: dict[str, Any]) -> WrittenPart:
    spans = tuple(Span(**each | {"shape": tuple(each["shape"])}) for each in raw["spans"])
    return WrittenPart(StoredFile(**raw["file"]), spans, int(raw["header_bytes"]), base64.b64decode(raw["skeleton"]))
