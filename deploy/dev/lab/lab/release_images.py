"""Images of a release for amd64 and arm64, assembled on one machine from Debian packages, locked wheels and its wheel.

No program of an arm64 image runs while it is made, so any machine can make it. The workflow ``release`` builds the same
images from their Dockerfiles.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from local_cluster import assembly, images, oci, paths
from local_cluster.process import Problem, niced, run, step

from lab.bill_of_materials import MACHINES, bill

IMAGES: Final = {"operator": "operator.txt", "trainer": "examples-cu12.txt"}
"""The lock of each image; that of the trainer for CUDA 13 is made by the workflow only."""
_BASE: Final = "python3,python3-venv,python3-pip,libstdc++6,ca-certificates,base-files,base-passwd,dash,coreutils"
_SETUP: Final = (
    'cp "$1/usr/share/base-passwd/passwd.master" "$1/etc/passwd"',
    'cp "$1/usr/share/base-passwd/group.master" "$1/etc/group"',
    'cat "$1"/usr/share/ca-certificates/mozilla/*.crt > "$1/etc/ssl/certs/ca-certificates.crt"',
    'ln -sf dash "$1/bin/sh"',
)
"""What the packages' own scripts would do, which only a machine of their architecture can run."""


def make(name: str, architectures: tuple[str, ...], *, root: Path, wheel: Path, version: str, out: Path) -> None:
    """Write an image for these architectures into ``out/images`` as an OCI layout, and its bills into ``out``.

    Args:
        name: ``operator`` or ``trainer``.
        architectures: of ``amd64`` and ``arm64``.
        root: the release's sources.
        wheel: the release's wheel.
        version: the release's.
        out: the release's folder.

    Raises:
        Problem: this Python is not that of the base, or a package cannot be had.
    """
    if sys.version_info[:2] != assembly.BASE_PYTHON:
        raise Problem(f"images need Python {'.'.join(map(str, assembly.BASE_PYTHON))}: `make setup PYTHON=python3.11`")
    (image,) = [each for each in images.own() if each.name.startswith(f"{name}:")]
    lock = root / "requirements" / IMAGES[name]
    settings = assembly.settings((root / name / "Dockerfile").read_text(encoding="utf-8"))
    own = assembly.installed(wheel, image.without)
    manifests = []
    for architecture in architectures:
        with step(f"image heterotrain-{name} for {architecture}"):
            base = _base(architecture)
            digest = oci.write_manifest([base, _packages(lock, architecture), own], settings.config, architecture)
        manifests.append({
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest,
            "size": oci.blob(digest).stat().st_size,
            "platform": {"os": "linux", "architecture": architecture},
        })  # fmt: skip
        parts = bill(
            f"heterotrain-{name}", version, lock=lock.read_text(encoding="utf-8"), architecture=architecture,
            dpkg_status=_dpkg_status(base),
        )  # fmt: skip
        (out / f"heterotrain-{name}-{architecture}.cdx.json").write_text(json.dumps(parts, indent=1), encoding="utf-8")
    _write_layout(out / "images" / name, manifests)


def _base(architecture: str) -> oci.Blob:
    """Return the layer of Debian packages; for a foreign architecture they are unpacked and not configured."""
    if oci.ARCHITECTURES.get(platform.machine()) == architecture:
        return images.base()

    def unpack() -> oci.Blob:
        hooks = [f"--customize-hook={each}" for each in _SETUP]
        with TemporaryDirectory(prefix="heterotrain-base-") as folder:
            target = Path(folder) / "base.tar"
            words = ["mmdebstrap", "--quiet", f"--architectures={architecture}", "--variant=extract", *hooks]
            run(*niced([*words, f"--include={_BASE}", "--format=tar", "bookworm", target]), timeout_s=900)
            return oci.write_blob(lambda blob: blob.write(target.read_bytes()))

    return oci.kept(f"base-{architecture}-{paths.digest((), _BASE, *_SETUP)}", unpack)


def _packages(lock: Path, architecture: str) -> oci.Blob:
    """Return the layer of the locked packages, from the wheels for an architecture."""
    with TemporaryDirectory(prefix="heterotrain-packages-") as folder:
        run(
            Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--python", sys.executable,
            "--target", folder, "--python-version", ".".join(map(str, assembly.BASE_PYTHON)),
            "--python-platform", f"{MACHINES[architecture]}-manylinux_2_28", "--only-binary", ":all:",
            "--require-hashes", "--no-deps", "-r", lock, timeout_s=1800,
        )  # fmt: skip
        found = importlib.metadata.distributions(path=[folder])
        return assembly.packed(sorted(found, key=lambda each: each.metadata["Name"].lower()))


def _dpkg_status(base: oci.Blob) -> str:
    with tarfile.open(oci.blob(base.digest)) as tar:
        file = tar.extractfile("./var/lib/dpkg/status")
        return file.read().decode() if file else ""


def _write_layout(folder: Path, manifests: list[dict[str, Any]]) -> None:
    """Write an OCI layout with links to the blobs of these manifests."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    for digest in {digest for each in manifests for digest in oci.blobs_of(each["digest"])}:
        (blobs / digest.partition(":")[2]).hardlink_to(oci.blob(digest))
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": manifests}
    (folder / "index.json").write_text(json.dumps(index))
