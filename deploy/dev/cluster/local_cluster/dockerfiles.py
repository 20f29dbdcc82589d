"""Images by buildah, from the users' Dockerfiles and without a daemon."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from local_cluster import oci, paths, toolchain
from local_cluster.process import niced, run

if TYPE_CHECKING:
    from local_cluster.images import Image

BASE = "localhost/heterotrain/base:bookworm"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LARGE_BYTES = 20_000_000


def build(image: Image, base: Callable[[], oci.Blob]) -> str:
    """Build an image and return its manifest's digest; ``base`` makes the image that it begins with."""
    toolchain.install_packages({"buildah": "buildah"})
    _buildah("rm", "--all")  # an interrupted build leaves mounts behind
    _import_base(base)
    wheels = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache/uv")
    wheels.mkdir(parents=True, exist_ok=True)
    # The machine may trust certificate authorities of its own, and its own environment has already fetched the wheels.
    mounts = [f"{wheels}:/root/.cache/uv", *([f"{CA_BUNDLE}:{CA_BUNDLE}:ro"] if CA_BUNDLE.exists() else [])]
    _buildah(
        "bud", "--layers", "--isolation", "chroot", "--pull-never", "--network", "host",
        *(word for mount in mounts for word in ("--volume", mount)),
        *(f"--build-arg={name}={value}" for name, value in {"BASE": BASE, **image.arguments}.items()),
        "-f", image.dockerfile, "-t", f"localhost/heterotrain/{image.name}", image.context,
    )  # fmt: skip
    return _export(image)


def _buildah(*words: str | Path, timeout_s: float = 1800) -> str:
    """Run buildah on a storage of its own, so that the machine's storage stays as it is."""
    storage = paths.cache() / "buildah"
    folders: list[str | Path] = ["--root", storage / "storage", "--runroot", storage / "run"]
    return run(*niced(["buildah", *folders, "--storage-driver", "overlay", *words]), timeout_s=timeout_s)


def _import_base(base: Callable[[], oci.Blob]) -> None:
    if BASE in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        return
    context = paths.cache() / "base"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    (context / "base.tar").hardlink_to(oci.blob(base().digest))
    (context / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
    _buildah("bud", "--isolation", "chroot", "-f", context / "Dockerfile", "-t", BASE, context)
    shutil.rmtree(context)


def _export(image: Image) -> str:
    """Add the image to the layout and return its manifest's digest."""
    name = f"localhost/heterotrain/{image.name}"
    blobs = oci.layout() / "oci/blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    if any(size > LARGE_BYTES and not (blobs / digest).exists() for digest, size in _layers(name)):
        # An export to a plain folder leaves layers uncompressed, and layers of the layout are not packed again.
        folder = oci.layout() / "export"
        shutil.rmtree(folder, ignore_errors=True)
        _buildah("push", "--disable-compression", name, f"dir:{folder}")
        for path in folder.iterdir():
            if len(path.name) == len("0" * 64):
                path.replace(blobs / path.name)
        shutil.rmtree(folder)
    _buildah("push", name, f"oci:{oci.layout() / 'oci'}:{image.reference}")
    manifests: dict[str, str] = {
        entry.get("annotations", {}).get("org.opencontainers.image.ref.name", ""): entry["digest"]
        for entry in json.loads((oci.layout() / "oci/index.json").read_text())["manifests"]
    }
    return manifests[image.reference]


def _layers(name: str) -> list[tuple[str, int]]:
    """Return digest and unpacked size in bytes of each layer of an image in buildah's storage."""
    inspected: dict[str, Any] = json.loads(_buildah("inspect", "--type", "image", name))
    wanted = set(inspected["OCIv1"]["rootfs"]["diff_ids"])
    stored = json.loads((paths.cache() / "buildah/storage/overlay-layers/layers.json").read_text())
    return [
        (layer["diff-digest"].removeprefix("sha256:"), int(layer.get("diff-size", 0)))
        for layer in stored
        if layer.get("diff-digest") in wanted
    ]
