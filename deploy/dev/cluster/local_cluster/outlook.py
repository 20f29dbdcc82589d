"""The first line of `make cluster` and `make demo`: what will happen, and about how long it takes.

It runs before any package is installed, so it needs nothing but Python.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from local_cluster import paths, releases, toolchain
from local_cluster.download import MEGABYTE, Limits, sizes
from local_cluster.process import Problem

# Measured on two processors. Compiling and packing keep all of them busy; starting and the demo mostly wait.
COMPILING_CORE_S = 1000
IMAGES_CORE_S = 200
PACKAGES_S = 60
START_S = 20
DEMO_S = 270
LONG_S = 90
WEIGHTS = {"kubernetes": 0.6, "prometheus": 0.15, "containerd": 0.1, "helm": 0.05, "coredns": 0.1}
"""Part of the time that each program takes to compile; a package of several counts for the first of them."""
PROBLEM = 3
"""The exit code for a mistake of the user; any other one means that there is no line to print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is left to do.

    Attributes:
        target: of make, such as ``demo``.
        cores: number of processors.
        has_packages: whether the Python environment is complete.
        download_bytes: size of the releases that will be downloaded.
        silent: whether no host of a release answers that could be downloaded.
        compiled: names of the programs that will be compiled.
        has_images: whether the images have been built before.
        is_running: whether there is a cluster already.
    """

    target: str
    cores: int
    has_packages: bool = False
    download_bytes: int = 0
    silent: bool = False
    compiled: Collection[str] = ()
    has_images: bool = False
    is_running: bool = False

    def line(self) -> str:
        """Return the line."""
        steps, needed_s = [], 0.0
        if not self.has_packages:
            steps.append("install Python packages")
            needed_s += PACKAGES_S
        if self.download_bytes:
            steps.append(f"download {self.download_bytes / MEGABYTE:.0f} MB of programs")
        if weight := sum(WEIGHTS.get(name, 0) for name in self.compiled):
            steps.append(self._compile())
            needed_s += weight * COMPILING_CORE_S / self.cores
        if not self.has_images:
            steps.append("build images")
            needed_s += IMAGES_CORE_S / self.cores
        if not self.is_running:
            steps.append("start the cluster")
            needed_s += START_S
        if self.target == "demo":
            steps.append("run the demo")
            needed_s += DEMO_S
        if not steps:
            return f"==> make {self.target}: everything is there"
        time = f"{needed_s / 60:.0f} min" if needed_s > LONG_S else f"{needed_s:.0f} s"
        beside = " beside the download" if self.download_bytes else ""
        processors = "1 processor" if self.cores == 1 else f"{self.cores} processors"
        return f"==> make {self.target}: {', '.join(steps)}: about {time} on {processors}{beside}"

    def _compile(self) -> str:
        if self.silent:
            return "compile the cluster's programs, as no host of their releases answers"
        return f"compile {', '.join(name for name in WEIGHTS if name in self.compiled)}"


def look(target: str, environment: Path) -> Outlook:
    """Find out what is left to do, and which hosts answer.

    Raises:
        Problem: ``BINARIES`` has a value that is none.
    """
    held = releases.known()
    missing = toolchain.outdated(toolchain.PROGRAMS, held)
    wanted = toolchain.wanted_releases(missing, held)
    found = sizes([file.url for release in wanted for file in release.files], Limits())
    answered = [release for release in wanted if all(file.url in found for file in release.files)]
    return Outlook(
        target=target,
        cores=len(os.sched_getaffinity(0)),
        has_packages=(environment / ".installed").exists(),
        download_bytes=sum(found[file.url] for release in answered for file in release.files),
        silent=bool(wanted) and not found,
        compiled={program.name for program in missing} - {name for each in answered for name in each.replaces},
        has_images=all((paths.cache() / f"images/{name}.json").exists() for name in ("operator", "trainer")),
        is_running=paths.kubeconfig().exists(),
    )


def main(arguments: Sequence[str]) -> int:
    """Print the line for a target and a folder of the Python environment."""
    target, environment = arguments
    if shutil.which("kind") and shutil.which("docker"):
        print(f"==> make {target}: by kind, if its Docker engine runs: about 10 min the first time", flush=True)
        return 0
    try:
        print(look(target, Path(environment)).line(), flush=True)
    except Problem as problem:
        print(f"problem: {problem}")
        return PROBLEM
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
