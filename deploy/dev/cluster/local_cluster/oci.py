"""The OCI layout that holds every image: its blobs, layers written as plain tar files, and archives of one image.

Layers stay uncompressed: compressing PyTorch takes minutes, and no layer travels over a network.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from local_cluster import paths

if TYPE_CHECKING:
    from typing_extensions import Buffer

COPY_BYTES = 1 << 20
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A part of an image in the layout: ``sha256:…``, and its size."""

    digest: str
    size_bytes: int


class Sink(io.RawIOBase):
    """Passes on what is written, and knows its length and, if asked for, its SHA-256."""

    def __init__(self, file: IO[bytes], *, hashes: bool = True) -> None:
        super().__init__()
        self._file, self._written_bytes = file, 0
        self._sha256 = hashlib.sha256() if hashes else None

    def writable(self) -> bool:
        """Return true."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._written_bytes

    def write(self, data: Buffer) -> int:
        """Pass bytes on."""
        count = len(memoryview(data))
        if self._sha256 is not None:
            self._sha256.update(data)
        self._file.write(data)
        self._written_bytes += count
        return count

    @property
    def blob(self) -> Blob:
        """What was written."""
        assert self._sha256 is not None  # noqa: S101  # asked for
        return Blob(digest=f"sha256:{self._sha256.hexdigest()}", size_bytes=self._written_bytes)


def layout() -> Path:
    """Return the folder of the OCI layout."""
    return paths.cache() / "images"


def blob(digest: str) -> Path:
    """Return the path of a blob."""
    return layout() / "oci/blobs" / digest.replace(":", "/")


def mark(name: str) -> Path:
    """Return the path of the note about an image: its inputs, and the digest of its manifest."""
    return layout() / f"{name.partition(':')[0]}.json"


def write_blob(write: Callable[[Sink], object]) -> Blob:
    """Add what ``write`` writes to the layout."""
    folder = layout() / "oci/blobs/sha256"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix="draft-", dir=folder)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            target = Sink(file)
            write(target)
        found = target.blob
        draft.chmod(0o644)
        draft.replace(blob(found.digest))
    finally:
        draft.unlink(missing_ok=True)
    return found


def write_layer(fill: Callable[[tarfile.TarFile], None]) -> Blob:
    """Add a layer with the entries that ``fill`` adds."""

    def write(target: Sink) -> None:
        with _tar(target) as tar:
            fill(tar)

    return write_blob(write)


def kept(key: str, make: Callable[[], Blob]) -> Blob:
    """Return the layer that was made under this key, or make it if the layout has none."""
    note = layout() / "layers" / f"{key}.json"
    if note.exists() and blob((known := Blob(**json.loads(note.read_text()))).digest).exists():
        return known
    made = make()
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(asdict(made)))
    return made


def write_manifest(layers: Iterable[Blob], settings: Mapping[str, Any], architecture: str = "") -> str:
    """Add an image of these layers and settings, such as ``Env`` and ``User``, and return its manifest's digest.

    Without an architecture, such as ``arm64``, it is one for this machine.
    """
    layers = tuple(layers)
    machine = platform.machine()
    configuration = {
        "architecture": architecture or ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": dict(settings),
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
    }
    config = write_document(configuration)
    kind = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": {"mediaType": f"{kind}.config.v1+json", "digest": config.digest, "size": config.size_bytes},
        "layers": [
            {"mediaType": f"{kind}.layer.v1.tar", "digest": layer.digest, "size": layer.size_bytes} for layer in layers
        ],
    }
    return write_document(manifest).digest


def write_document(document: object) -> Blob:
    """Add a JSON document."""
    text = json.dumps(document, sort_keys=True).encode()
    return write_blob(lambda target: target.write(text))


def blobs_of(manifest_digest: str) -> list[str]:
    """Return the digests of an image: manifest, configuration, layers."""
    manifest = json.loads(blob(manifest_digest).read_text())
    return [manifest_digest, manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]


def prune(manifests: Iterable[str]) -> None:
    """Delete every blob that belongs to none of these images."""
    kept = {digest for manifest in manifests for digest in blobs_of(manifest)}
    for path in (layout() / "oci/blobs/sha256").iterdir():
        if f"sha256:{path.name}" not in kept:
            path.unlink()


def archive(name: str, reference: str, *, without: set[str]) -> Callable[[IO[bytes]], None]:
    """Return a function that writes an image as an OCI archive without the layers that the reader already has."""
    manifest_digest = str(json.loads(mark(name).read_text())["manifest"])
    index = {
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": manifest_digest,
            "size": blob(manifest_digest).stat().st_size,
            "annotations": {"io.containerd.image.name": reference},
        }],
    }  # fmt: skip
    digests = dict.fromkeys(blobs_of(manifest_digest))

    def write(target: IO[bytes]) -> None:
        with _tar(Sink(target, hashes=False)) as tar:
            for entry_name, document in (("oci-layout", {"imageLayoutVersion": "1.0.0"}), ("index.json", index)):
                add_text(tar, entry_name, json.dumps(document))
            for digest in digests:
                if digest not in without:
                    tar.add(blob(digest), arcname=f"blobs/{digest.replace(':', '/')}")

    return write


def add_text(tar: tarfile.TarFile, name: str, text: str | bytes, *, mode: int = 0o644) -> None:
    """Add a file with this content to a tar archive."""
    content = text.encode() if isinstance(text, str) else text
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _tar(target: Sink) -> tarfile.TarFile:
    return tarfile.TarFile(fileobj=target, mode="w", format=tarfile.GNU_FORMAT, copybufsize=COPY_BYTES)
