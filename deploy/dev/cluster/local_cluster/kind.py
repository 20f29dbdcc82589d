"""The same commands where a Docker engine runs: kind starts the cluster, docker controls its nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

from local_cluster import paths, topology
from local_cluster.process import Problem, run, say

CONFIGURATION = paths.REPOSITORY / "kind-config.yaml"
IMAGES = {"heterotrain/operator:dev": "operator/Dockerfile", "heterotrain/trainer:dev": "trainer/Dockerfile"}
PROMETHEUS = ("quay.io/prometheus/prometheus:v3.15.0", "heterotrain/prometheus:local")
BUSYBOX = "docker.io/library/busybox:1.37@sha256:9db7b59979c38555a39def84a31fb98b5296952f9e3afd4f6f11f05b07adfab0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch without CUDA, from its own index: an eighth of the size, and a kind cluster has no GPU."""


def is_available() -> bool:
    """Return whether kind is installed and a Docker engine answers."""
    return shutil.which("kind") is not None and shutil.which("docker") is not None and _succeeds("docker", "info")


def is_running() -> bool:
    """Return whether kind runs the cluster; a running cluster without Docker takes precedence."""
    if paths.kubeconfig().exists() or shutil.which("kind") is None or shutil.which("docker") is None:
        return False
    return _succeeds("docker", "inspect", f"{_name()}-control-plane")


def up(*, reuse: bool = False) -> None:
    """Start the cluster, with the project's images in it.

    Args:
        reuse: accept a cluster that is already running.

    Raises:
        Problem: it is already running, or kind could not start it.
    """
    if is_running():
        if reuse:
            return
        raise Problem("a cluster is running already: use it, or end it with `make cluster-down` first")
    plan = topology.read(CONFIGURATION.read_text())
    for mount in {mount.host_path for node in plan.nodes for mount in node.mounts}:
        _shared_folder(mount)
    say("    kind create cluster")
    options: list[str | Path] = ["--config", CONFIGURATION, "--kubeconfig", kubeconfig(), "--wait", "120s"]
    run("kind", "create", "cluster", *options, timeout_s=900)
    load_images()


def down() -> None:
    """Stop the cluster; without a running cluster this does nothing."""
    run("kind", "delete", "cluster", "--name", _name(), timeout_s=300)
    kubeconfig().unlink(missing_ok=True)


def setup() -> None:
    """Do nothing: kind brings its own programs."""


def status() -> str:
    """Return the nodes as kubectl shows them.

    Raises:
        Problem: no cluster is running.
    """
    if not is_running():
        raise Problem("no cluster is running: `make cluster` starts one")
    return run("kubectl", "--kubeconfig", kubeconfig(), "get", "nodes", "--show-labels").rstrip()


def build_images() -> None:
    """Build the project's images with docker, and pull Prometheus under the name that the manifests use."""
    for image, dockerfile in IMAGES.items():
        say(f"    docker build {image}")
        arguments = ["--build-arg", f"TORCH_INDEX={TORCH_INDEX}"] if image.startswith("heterotrain/trainer") else []
        options = ["-q", *arguments, "-f", dockerfile, "-t", image]
        run("docker", "build", *options, ".", cwd=paths.REPOSITORY, timeout_s=3600)
    upstream, name = PROMETHEUS
    run("docker", "pull", "-q", upstream, timeout_s=600)
    run("docker", "tag", upstream, name)


def load_images() -> None:
    """Build the project's images and load them into every node; pods created afterwards run them."""
    build_images()
    run("kind", "load", "docker-image", "--name", _name(), *IMAGES, PROMETHEUS[1], timeout_s=900)


def kubeconfig() -> Path:
    """Return the administrator's kubeconfig."""
    return paths.cache() / "kind.kubeconfig"


def power_off(node: str) -> None:
    """Cut the network link first, so that the kernel cannot close the connections of the killed processes."""
    unplug(node)
    run("docker", "kill", node)


def power_on(node: str) -> None:
    """Start the node's container; docker gives it a new network link."""
    run("docker", "start", node)


def unplug(node: str) -> None:
    """Take the node's network device down."""
    run("docker", "exec", _known(node), "ip", "link", "set", "eth0", "down")


def plug(node: str) -> None:
    """Bring the device up again, with the default route that it lost."""
    gateway = run(
        "docker", "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.Gateway}}{{end}}", _known(node)
    ).strip()  # fmt: skip
    run("docker", "exec", node, "ip", "link", "set", "eth0", "up")
    run("docker", "exec", node, "ip", "route", "replace", "default", "via", gateway)


def inside(node: str, *command: str, stdin: str | None = None) -> str:
    """Run a command in the node's container."""
    return run("docker", "exec", "--interactive", _known(node), *command, stdin=stdin)


def _name() -> str:
    return topology.read(CONFIGURATION.read_text()).name


def _known(node: str) -> str:
    return topology.read(CONFIGURATION.read_text()).node(node).name


def _shared_folder(path: str) -> None:
    """Make the nodes' common folder writable for pods of any user; only the Docker engine runs as root."""
    container = ["--rm", "--volume", f"{path}:/shared", BUSYBOX]
    run("docker", "run", *container, "chmod", "1777", "/shared", timeout_s=300)


def _succeeds(*command: str) -> bool:
    try:
        run(*command, timeout_s=30)
    except Problem:
        return False
    return True
