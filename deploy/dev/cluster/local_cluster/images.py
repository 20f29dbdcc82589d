"""The images that the cluster's pods run, and how each is built: assembled from what is there, or by its Dockerfile.

An image with unchanged inputs is not rebuilt.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from local_cluster import assembly, dockerfiles, oci, paths
from local_cluster.process import Problem, niced, run, step

NOT_IN_PODS = (
    "heterotrain_planner", "heterotrain_operator", "heterotrain_cli", "heterotrain_client",
)  # fmt: skip
"""Packages of the wheel that no training script imports; trainer/Dockerfile leaves out the same."""


class Way(StrEnum):
    """How images are built: by what is there already, or always the one or the other."""

    EITHER = ""
    ENVIRONMENT = "environment"
    DOCKERFILE = "dockerfile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that the cluster's pods run.

    Attributes:
        inputs: files and folders that it is made from; it is rebuilt only after a change in one of them.
        context: folder that the Dockerfile copies from.
        lock: the Python packages that it holds; ``None`` for none.
        without: packages of the project's wheel that it does not hold.
    """

    name: str
    dockerfile: Path
    inputs: tuple[Path, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)
    context: Path = paths.REPOSITORY
    lock: Path | None = None
    without: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """Its full name, as Kubernetes completes the short one."""
        return f"docker.io/heterotrain/{self.name}"


def own() -> list[Image]:
    """Return the images of this project: what `make images` builds.

    The larger one comes first: its packages are packed while the base of both is made. Both install the wheel, and the
    trainer's leaves out what no training script runs. A change of what an image does not run rebuilds nothing.
    """
    core, project = paths.REPOSITORY / "core/heterotrain_core", paths.REPOSITORY / "pyproject.toml"
    planner = paths.REPOSITORY / "planner/heterotrain_planner"
    locks = paths.REPOSITORY / "requirements"
    operator, trainer = paths.REPOSITORY / "operator", paths.REPOSITORY / "trainer"
    return [
        Image(
            name="trainer:dev",
            dockerfile=trainer / "Dockerfile",
            lock=locks / "examples.txt",
            without=NOT_IN_PODS,
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
        Image(
            name="operator:dev",
            dockerfile=operator / "Dockerfile",
            lock=locks / "operator.txt",
            inputs=(
                operator / "Dockerfile",
                project,
                locks / "build.txt",
                locks / "operator.txt",
                core,
                planner,
                operator / "heterotrain_operator",
            ),
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


def build(image: Image) -> str:
    """Build the image if one of its inputs has changed, and return its manifest's digest.

    Raises:
        Problem: it cannot be built, or ``IMAGES`` has a value that is none.
    """
    mark, chosen = oci.mark(image.name), _chosen()
    known: dict[str, str] = json.loads(mark.read_text()) if mark.exists() else {}
    inputs = paths.digest(image.inputs, json.dumps(dict(image.arguments), sort_keys=True), *image.without)
    begun = Way(known.get("way", Way.DOCKERFILE)) if known else Way.EITHER
    if known.get("inputs") == inputs and chosen in (Way.EITHER, begun):
        return known["manifest"]
    # An image goes on as it was begun: its large layers are there.
    way = chosen or begun
    if way is not Way.DOCKERFILE:
        way = _if_served(image, must=chosen is Way.ENVIRONMENT)
    with step(f"image heterotrain/{image.name}"):
        make = assembly.build if way is Way.ENVIRONMENT else dockerfiles.build
        manifest = make(image, base)
    mark.write_text(json.dumps({"inputs": inputs, "manifest": manifest, "way": way}))
    oci.prune(json.loads(path.read_text())["manifest"] for path in oci.layout().glob("*.json"))
    return manifest


def base() -> oci.Blob:
    """Return the base image's only layer, of Debian packages: it has Python 3.11, as the official image does."""

    def make() -> oci.Blob:
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        with TemporaryDirectory(prefix="heterotrain-base-") as folder:
            target = Path(folder) / "base.tar"
            command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "--format=tar"]
            run(*niced([*command, "bookworm", target]), timeout_s=900)
            with target.open("rb") as file:
                return oci.write_blob(lambda blob: shutil.copyfileobj(file, blob, oci.COPY_BYTES))

    return oci.kept("base", make)


def _chosen() -> Way:
    value = os.environ.get("IMAGES", "")
    try:
        return Way(value)
    except ValueError as error:
        raise Problem(f"IMAGES is {value!r}, but it can be environment, dockerfile, or nothing for either") from error


def _if_served(image: Image, *, must: bool) -> Way:
    if assembly.serves(image):
        return Way.ENVIRONMENT
    if must:
        raise Problem(
            f"IMAGES=environment, but this Python is not 3.11 or lacks packages of {image.lock}: `make setup`"
        )
    return Way.DOCKERFILE
