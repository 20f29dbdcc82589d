"""The images that the cluster's pods run, each assembled from what is there.

An image with unchanged inputs is not rebuilt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from local_cluster import assembly, oci, paths
from local_cluster.process import Problem, niced, run, step

NOT_IN_PODS = (
    "heterotrain_planner", "heterotrain_operator", "heterotrain_cli", "heterotrain_client",
)  # fmt: skip
"""Packages of the wheel that no training script imports; trainer/Dockerfile leaves out the same."""


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
        Problem: the environment has not what the image needs.
    """
    mark = oci.mark(image.name)
    known: dict[str, str] = json.loads(mark.read_text()) if mark.exists() else {}
    inputs = paths.digest(image.inputs, json.dumps(dict(image.arguments), sort_keys=True), *image.without)
    if known.get("inputs") == inputs:
        return known["manifest"]
    if not assembly.serves(image):
        raise Problem(
            f"this Python is not 3.11 or lacks packages of {image.lock}: `make setup PYTHON=python3.11`, or start a "
            "Docker engine and install kind"
        )
    with step(f"image heterotrain/{image.name}"):
        manifest = assembly.build(image, base)
    mark.write_text(json.dumps({"inputs": inputs, "manifest": manifest}))
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
