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
from dataclasses import asdict, dataclass
from typing import Any

from heterotrain.checkpoints.part import Span
from heterotrain.checkpoints.storage import StoredFile

FORMAT = 3
MARK_BITS = 48
"""A mark is sent in the control vector as a float64, which represents whole numbers up to 2^53."""
SKELETON = "-skeleton.pt"
MOST = 2**53
"""Larger sizes and counts are not ones."""
MOST_DIMENSIONS = 64
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
class Located(Span):
    """Elements of a tensor in a part.

    Attributes:
        part: number of the part.
        at: place of the first byte in the part's file.
    """

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
        tensors: where every tensor is.
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
    return json.dumps(asdict(manifest)).encode()


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
        skeleton, parts = _file(raw["skeleton"]), tuple(_file(part) for part in raw["parts"])
        tensors = tuple(_located(each, len(parts)) for each in raw["tensors"])
        hooked, evaluated = raw["hooks"]
        manifest = Manifest(
            format=raw["format"], generation=_count(raw["generation"]), step=_count(raw["step"]), skeleton=skeleton,
            parts=parts, written_unix_s=_number(raw["written_unix_s"]),
            hooks=(_count(hooked, least=-1), _count(evaluated, least=-1)), tensors=tensors,
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or of another type: {error!r}") from error
    if label is None or manifest.order != (label.generation, label.step):
        raise ValueError("it is that of another checkpoint")
    own = (label.skeleton, *(label.part(index, len(parts)) for index in range(len(parts))))
    if manifest.files != own:
        raise ValueError("it names files that are not its own")
    return manifest


def encode_part(part: WrittenPart) -> bytes:
    """Return the entry of a part for the manifest, which its writer stores next to it."""
    return json.dumps(asdict(part) | {"skeleton": base64.b64encode(part.skeleton).decode()}).encode()


def decode_part(name: str, text: bytes) -> WrittenPart:
    """Return the entry of the part in the file ``name``.

    Raises:
        ValueError: it is none, or that of another part.
    """
    raw = _object(text)
    try:
        file = _file(raw["file"])
        spans = tuple(_span(each) for each in raw["spans"])
        part = WrittenPart(file, spans, _count(raw["header_bytes"]), base64.b64decode(raw["skeleton"], validate=True))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or of another type: {error!r}") from error
    if file.name != name:
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


def _file(raw: dict[str, Any]) -> StoredFile:
    sha256 = _text(raw["sha256"])
    if _SHA256.fullmatch(sha256) is None:
        raise ValueError("a checksum is not one")
    return StoredFile(name=_text(raw["name"]), size_bytes=_count(raw["size_bytes"]), sha256=sha256)


def _span(raw: dict[str, Any]) -> Span:
    shape = tuple(_count(length) for length in raw["shape"])
    span = Span(_text(raw["name"]), _text(raw["dtype"]), shape, _count(raw["start"]), _count(raw["stop"]))
    if len(shape) > MOST_DIMENSIONS or not span.start <= span.stop <= math.prod(shape):
        raise ValueError("elements of a tensor are outside of it")
    return span


def _located(raw: dict[str, Any], parts: int) -> Located:
    span, part = _span(raw), _count(raw["part"])
    if part >= parts:
        raise ValueError("a tensor is in a part that does not exist")
    return Located(**asdict(span), part=part, at=_count(raw["at"]))


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
