"""The description of a checkpoint: names of its files, and the manifest with the size and SHA-256 of each.

A store may hold what others wrote. So everything that is read is checked before it is used: a manifest names the files
that belong to its own name, and nothing else, whatever it says. Who may write to the store may still replace a whole
checkpoint (docs/adr/0029).
"""

from __future__ import annotations

import base64
import json
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heterotrain.checkpoints.storage import StoredFile
from heterotrain.state.ranges import TensorRange

FORMAT = 3
MARK_BITS = 48
"""A mark is sent in the control vector as a float64, which represents whole numbers up to 2^53."""
SKELETON = "-skeleton.pt"
MOST = 2**53
"""Larger sizes and counts are not ones."""
_MANIFEST = re.compile(r"checkpoint-g(\d{9})-s(\d{12})-([0-9a-f]{12})\.json", re.ASCII)
_ANY = re.compile(
    r"\.?checkpoint-g(\d{9})-s(\d{12})-[0-9a-f]{12}(?:\.json|-[a-z0-9]+\.(?:pt|json|safetensors))", re.ASCII
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


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

    @property
    def manifest(self) -> str:
        """Name of its manifest."""
        return f"{self.stem}.json"

    @property
    def skeleton(self) -> str:
        """Name of the file with its skeleton."""
        return f"{self.stem}{SKELETON}"

    def part(self, index: int, count: int, *, ending: str = "safetensors") -> str:
        """Name of a part: its data, or with the ending ``json`` its entry for the manifest."""
        return f"{self.stem}-p{index}of{count}.{ending}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart(StoredFile):
    """A part in the store.

    Attributes:
        places: the ranges in it, in order, each with the place of its first byte in the file.
        skeleton: of the state that the writer holds a part of; empty where every rank holds the whole state.
    """

    places: Mapping[TensorRange, int]
    skeleton: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a complete checkpoint.

    Attributes:
        parts: its parts, which say where every tensor is.
        hooks: steps and epochs whose hooks have run. Of two checkpoints of one step the greater is the newer one.
    """

    generation: int
    step: int
    skeleton: StoredFile
    parts: tuple[WrittenPart, ...]
    written_unix_s: float
    hooks: tuple[int, int] = (-1, -1)

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


def new_mark() -> int:
    """Return a random mark, distinct from that of any other attempt."""
    return secrets.randbits(MARK_BITS)


def label_of(name: str) -> Label | None:
    """Return the attempt whose manifest has this name; ``None`` for any other file."""
    found = _MANIFEST.fullmatch(name)
    return found and Label(generation=int(found[1]), step=int(found[2]), mark=int(found[3], 16))


def order_of(name: str) -> tuple[int, int] | None:
    """Return (generation, step) of the checkpoint that a file belongs to, by its name; ``None`` for other files."""
    found = _ANY.fullmatch(name)
    return found and (int(found[1]), int(found[2]))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as it is stored."""
    tensors = [{"part": number} | each for number, part in enumerate(manifest.parts) for each in _ranges(part)]
    parts = {"skeleton": _stated(manifest.skeleton), "parts": [_stated(part) for part in manifest.parts]}
    order = {"generation": manifest.generation, "step": manifest.step, "hooks": manifest.hooks}
    return json.dumps(
        {"format": FORMAT, "written_unix_s": manifest.written_unix_s} | order | parts | {"tensors": tensors}
    ).encode()


def decode_manifest(name: str, text: bytes) -> Manifest:
    """Return the manifest that a file of this name contains.

    Raises:
        ValueError: it is none, is of another checkpoint or version, or names files that are not its own.
    """
    label = label_of(name)
    raw = _object(text)
    if raw.get("format") != FORMAT:
        raise ValueError(f"it has format {raw.get('format')!s:.20}, this version reads {FORMAT}")
    try:
        places: list[dict[TensorRange, int]] = [{} for _ in raw["parts"]]
        for each in raw["tensors"]:
            places[_count(each["part"])] |= _place(each)
        hooked, evaluated = raw["hooks"]
        parts = tuple(WrittenPart(**_file(part), places=own) for part, own in zip(raw["parts"], places, strict=True))
        manifest = Manifest(
            generation=_count(raw["generation"]), step=_count(raw["step"]), parts=parts,
            skeleton=StoredFile(**_file(raw["skeleton"])), written_unix_s=_number(raw["written_unix_s"]),
            hooks=(_count(hooked, least=-1), _count(evaluated, least=-1)),
        )  # fmt: skip
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or of another type: {error!r}") from error
    if label is None or manifest.order != (label.generation, label.step):
        raise ValueError("it is that of another checkpoint")
    own = (label.skeleton, *(label.part(index, len(parts)) for index in range(len(parts))))
    if manifest.files != own:
        raise ValueError("it names files that are not its own")
    return manifest


def encode_part(part: WrittenPart) -> bytes:
    """Return the entry of a part for the manifest, which its writer stores next to it."""
    skeleton = base64.b64encode(part.skeleton).decode()
    return json.dumps({"file": _stated(part), "tensors": _ranges(part), "skeleton": skeleton}).encode()


def decode_part(name: str, text: bytes) -> WrittenPart:
    """Return the entry of the part in the file ``name``.

    Raises:
        ValueError: it is none, or that of another part.
    """
    raw = _object(text)
    try:
        places = {own: at for each in raw["tensors"] for own, at in _place(each).items()}
        skeleton = base64.b64decode(raw["skeleton"], validate=True)
        part = WrittenPart(**_file(raw["file"]), places=places, skeleton=skeleton)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or of another type: {error!r}") from error
    if part.name != name:
        raise ValueError("it is the entry of another part")
    return part


def _object(text: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(raw, dict):
        raise ValueError("it is not a JSON object")
    return raw


def _stated(file: StoredFile) -> dict[str, Any]:
    return {"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256}


def _ranges(part: WrittenPart) -> list[dict[str, Any]]:
    return [{"name": own.name, "start": own.start, "stop": own.stop, "at": at} for own, at in part.places.items()]


def _file(raw: dict[str, Any]) -> dict[str, Any]:
    sha256 = _text(raw["sha256"])
    if _SHA256.fullmatch(sha256) is None:
        raise ValueError("a checksum is not one")
    return {"name": _text(raw["name"]), "size_bytes": _count(raw["size_bytes"]), "sha256": sha256}


def _place(raw: dict[str, Any]) -> dict[TensorRange, int]:
    return {TensorRange(_text(raw["name"]), _count(raw["start"]), _count(raw["stop"])): _count(raw["at"])}


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise TypeError(f"{raw!r:.40} is not text")
    return raw


def _count(raw: object, *, least: int = 0) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not least <= raw <= MOST:
        raise ValueError(f"{raw!r:.40} is not a count")
    return raw


def _number(raw: object) -> float:
    if not isinstance(raw, int | float) or not math.isfinite(raw):
        raise ValueError(f"{raw!r:.40} is not a number")
    return float(raw)
