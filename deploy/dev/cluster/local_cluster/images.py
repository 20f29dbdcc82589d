"""Images: built by buildah without a daemon, from the users' Dockerfiles, and kept as one OCI layout.

An image with unchanged inputs is not rebuilt. Large layers stay uncompressed: compressing PyTorch takes minutes, and no
layer travels over a network.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from local_cluster import paths
from local_cluster.process import niced, run, step

BASE = "localhost/heterotrain/base:bookworm"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LARGE_BYTES = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that the cluster's pods run.

    Attributes:
        inputs: files and folders that it is made from; it is rebuilt only after a change in one of them.
        context: folder that the Dockerfile copies from.
    """

    name: str
    dockerfile: Path
    inputs: tuple[Path, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)
    context: Path = paths.REPOSITORY

    @property
    def reference(self) -> str:
        """Its full name, as Kubernetes completes the short one."""
        return f"docker.io/heterotrain/{self.name}"


def own() -> list[Image]:
    """Return the images of this project: what `make images` builds.

    Both install the wheel, which has all packages. A change of a package that an image does not run rebuilds nothing.
    """
    core, project = paths.REPOSITORY / "core/heterotrain_core", paths.REPOSITORY / "pyproject.toml"
    locks = paths.REPOSITORY / "requirements"
    operator, trainer = paths.REPOSITORY / "operator", paths.REPOSITORY / "trainer"
    return [
        Image(
            name="operator:dev",
            dockerfile=operator / "Dockerfile",
            inputs=(
                operator / "Dockerfile",
                project,
                locks / "build.txt",
                locks / "operator.txt",
                core,
                operator / "heterotrain_operator",
            ),
        ),
        Image(
            name="trainer:dev",
            dockerfile=trainer / "Dockerfile",
            inputs=(
                trainer / "Dockerfile",
                project,
                locks / "build.txt",
                locks / "examples.txt",
                core,
                trainer / "heterotrain",
            ),
            # The package registry has PyTorch only with CUDA. These two packages are a quarter of its size, and nothing
            # loads them on a CPU: a compiler for GPU kernels, and a solver that is opened on first use.
            arguments={"LEAVE_OUT": "triton==|nvidia-cusolver=="},
        ),
    ]


def of_cluster() -> list[Image]:
    """Return the images of the cluster's own pods."""
    return [
        Image(
            name=f"{name}:local",
            dockerfile=paths.LOCAL / name / "Dockerfile",
            inputs=(paths.LOCAL / name / "Dockerfile", paths.programs() / name),
            context=paths.programs(),
        )
        for name in ("pause", "coredns", "prometheus")
    ]


def layout() -> Path:
    """Return the folder of the OCI layout that holds every image."""
    return paths.cache() / "images"


def build(image: Image) -> str:
    """Build the image if one of its inputs has changed, and return its manifest's digest."""
    mark = layout() / f"{image.name.partition(':')[0]}.json"
    inputs = paths.digest(image.inputs, json.dumps(dict(image.arguments), sort_keys=True))
    if mark.exists() and (known := json.loads(mark.read_text()))["inputs"] == inputs:
        return str(known["manifest"])
    with step(f"image heterotrain/{image.name}"):
        _buildah("rm", "--all")  # an interrupted build leaves mounts behind
        _base()
        _bud(image)
        manifest = _export(image)
    mark.write_text(json.dumps({"inputs": inputs, "manifest": manifest}))
    return manifest


def archive(image: Image, *, without: set[str]) -> Callable[[IO[bytes]], None]:
    """Return a function that writes the image as an OCI archive without the layers that the reader already has."""
    manifest_digest = str(json.loads((layout() / f"{image.name.partition(':')[0]}.json").read_text())["manifest"])
    manifest = json.loads(_blob(manifest_digest).read_text())
    index = {
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": manifest_digest,
            "size": _blob(manifest_digest).stat().st_size,
            "annotations": {"io.containerd.image.name": image.reference},
        }],
    }  # fmt: skip
    digests = dict.fromkeys(
        [manifest_digest, manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]
    )

    def write(target: IO[bytes]) -> None:
        with tarfile.open(fileobj=target, mode="w|") as tar:
            for name, document in (("oci-layout", {"imageLayoutVersion": "1.0.0"}), ("index.json", index)):
                text = json.dumps(document).encode()
                entry = tarfile.TarInfo(name)
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
            for digest in digests:
                if digest not in without:
                    tar.add(_blob(digest), arcname=f"blobs/{digest.replace(':', '/')}")

    return write


def _blob(digest: str) -> Path:
    return layout() / "oci/blobs" / digest.replace(":", "/")


def _buildah(*words: str | Path, timeout_s: float = 1800) -> str:
    """Run buildah on a storage of its own, so that the machine's storage stays as it is."""
    storage = paths.cache() / "buildah"
    folders: list[str | Path] = ["--root", storage / "storage", "--runroot", storage / "run"]
    return run(*niced(["buildah", *folders, "--storage-driver", "overlay", *words]), timeout_s=timeout_s)


def _base() -> None:
    """Make the base image from Debian packages, once: it has Python 3.11, as the official image does."""
    if BASE in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        return
    context = paths.cache() / "base"
    context.mkdir(parents=True, exist_ok=True)
    run(
        *niced(["mmdebstrap", "--variant=minbase", "--include=python3,python3-venv,python3-pip,ca-certificates"]),
        "--format=tar", "bookworm", context / "base.tar", timeout_s=900,
    )  # fmt: skip
    (context / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
    _buildah("bud", "--isolation", "chroot", "-f", context / "Dockerfile", "-t", BASE, context)
    shutil.rmtree(context)


def _bud(image: Image) -> None:
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


def _export(image: Image) -> str:
    """Add the image to the layout and return its manifest's digest."""
    name = f"localhost/heterotrain/{image.name}"
    blobs = layout() / "oci/blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    if any(size > LARGE_BYTES and not (blobs / digest).exists() for digest, size in _layers(name)):
        # An export to a plain folder leaves layers uncompressed, and layers of the layout are not packed again.
        folder = layout() / "export"
        shutil.rmtree(folder, ignore_errors=True)
        _buildah("push", "--disable-compression", name, f"dir:{folder}")
        for path in folder.iterdir():
            if len(path.name) == len("0" * 64):
                path.replace(blobs / path.name)
        shutil.rmtree(folder)
    _buildah("push", name, f"oci:{layout() / 'oci'}:{image.reference}")
    manifests: dict[str, str] = {
        entry.get("annotations", {}).get("org.opencontainers.image.ref.name", ""): entry["digest"]
        for entry in json.loads((layout() / "oci/index.json").read_text())["manifests"]
    }
    _prune(manifests.values())
    return manifests[image.reference]


def _prune(manifests: Iterable[str]) -> None:
    """Delete every blob of the layout that no image refers to."""
    kept = set(manifests)
    for digest in list(kept):
        manifest = json.loads(_blob(digest).read_text())
        kept |= {manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
    for path in (layout() / "oci/blobs/sha256").iterdir():
        if f"sha256:{path.name}" not in kept:
            path.unlink()


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
