"""Start the cluster until all nodes are Ready, and remove it without a trace."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

from local_cluster import cgroups, images, network, node, paths, pki, record, template, toolchain, topology
from local_cluster.process import Problem, run, say, step, wait_until

CONFIGURATION = paths.REPOSITORY / "kind-config.yaml"
GRACE = "GRACE"
"""Variable: ``short``, the default, or ``real`` for the times after which Kubernetes takes a silent node for lost."""


def setup(*also: toolchain.Program) -> None:
    """Install and build everything that a cluster needs to start, and ``also`` more programs.

    A second run finds nothing to do.
    """
    if os.geteuid() != 0:
        raise Problem(
            "a cluster without Docker needs root: run this as root, or start a Docker engine and install kind"
        )
    with record.building("setup"):
        toolchain.install_packages()
        # In parallel: compiling keeps the processors busy, packing PyTorch the disk.
        with ThreadPoolExecutor(1) as background:
            programs = background.submit(toolchain.build_programs, *also)
            for image in images.own():
                images.build(image)
            programs.result()
        for image in images.of_cluster():
            images.build(image)


def up(*, reuse: bool = False) -> None:
    """Start the cluster and return when its nodes and its DNS are ready.

    Args:
        reuse: accept a cluster that is already running.

    Raises:
        Problem: a cluster is already running, or part of it did not start; then everything is removed again.
    """
    with record.exclusively("up"):
        known = record.load()
        if known is not None and known.is_up and known.is_alive:
            if reuse:
                return
            raise Problem("a cluster is running already: use it, or end it with `make cluster-down` first")
        setup()
        _clear()
        with record.building("up"):  # after _clear(): the remains of a cluster still use the template
            template.fill([*images.of_cluster(), *images.own()])
        started_s = time.monotonic()
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            _start(configuration(os.environ.get(GRACE) or "short"))
        except BaseException:
            say("    the start failed: removing the incomplete cluster")
            _clear()
            raise
        took_s = time.monotonic() - started_s
        say(f"    the cluster is ready after {took_s:.1f} s: export KUBECONFIG={paths.kubeconfig()}")


def down() -> None:
    """Stop the cluster, or remove the remains of a crashed one; without a cluster this does nothing."""
    with record.exclusively("down"):
        _clear()


def configuration(grace: str) -> str:
    """Return the text of the cluster's configuration.

    Raises:
        Problem: ``grace`` is neither ``short`` nor ``real``.
    """
    if grace not in ("short", "real"):
        raise Problem(f"{GRACE} is {grace!r}: write short or real")
    text = CONFIGURATION.read_text()
    return topology.with_short_grace(text) if grace == "short" else text


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start(text: str) -> None:
    plan = topology.read(text)
    record.save(record.Record(topology=text))
    with step("network and certificates"):
        network.create_bridge(plan)
        pki.issue(paths.cluster() / "pki", plan)
        shutil.copy2(paths.cluster() / "pki/admin.kubeconfig", paths.kubeconfig())
    with step(f"{len(plan.nodes)} nodes"), ThreadPoolExecutor(len(plan.nodes)) as pool:

        def start(each: topology.Node) -> None:
            node.link_images(each, template.root())
            node.power_on(each, plan)

        # The control plane first: all other nodes wait for it.
        start(plan.control_plane)
        list(pool.map(start, [each for each in plan.nodes if not each.is_control_plane]))
    with step("control plane"):
        wait_until(lambda: _answers("get", "--raw", "/readyz"), "the API server", timeout_s=120)
        wait_until(lambda: _answers("get", "node", plan.control_plane.name), "the control plane's node", timeout_s=120)
        kubectl("label", "node", plan.control_plane.name, "node-role.kubernetes.io/control-plane=")
        kubectl("apply", "-f", str(paths.LOCAL / "coredns/coredns.yaml"))
    with step("nodes Ready"):
        for each in plan.nodes:
            wait_until(lambda name=each.name: _answers("get", "node", name), f"node {each.name}", timeout_s=120)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        kubectl("wait", "--for=condition=Ready", "nodes", "--all", "--timeout=180s")
    with step("DNS"):
        kubectl("rollout", "status", "deployment/coredns", "--namespace=kube-system", "--timeout=180s")
    record.update(lambda known: record.Record(topology=known.topology, nodes=known.nodes, is_up=True))


def kubectl(*arguments: str) -> str:
    """Run the cluster's kubectl as its administrator."""
    return run(paths.programs() / "kubectl", "--kubeconfig", paths.kubeconfig(), *arguments)


def _answers(*arguments: str) -> bool:
    try:
        kubectl(*arguments, "--request-timeout=5s")
    except Problem:
        return False
    return True


def _clear() -> None:
    """Remove everything in the record, and everything that carries the cluster's names."""
    known = record.load()
    if known is not None:
        for process in known.nodes.values():
            process.kill()
    for device in network.devices():
        network.disconnect(device)
    cgroups.remove_branches()
    folder = paths.cluster()
    if folder.exists():
        # The record goes last, so that it survives a crash in the middle.
        for path in sorted(folder.iterdir(), key=lambda path: path.name.startswith("record")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.rmdir()


def status() -> str:
    """Return a table of the nodes: power, network link, address, labels.

    Raises:
        Problem: no cluster is running.
    """
    known = record.present()
    plan = topology.read(known.topology)
    lines = [f"{'NODE':28}{'POWER':8}{'LINK':8}{'ADDRESS':16}LABELS"]
    for each in plan.nodes:
        process = known.nodes.get(each.name)
        power = "on" if process is not None and process.is_alive else "off"
        link = "up" if network.is_plugged(each) else "down"
        labels = ",".join(f"{key}={value}" for key, value in each.labels.items())
        lines.append(f"{each.name:28}{power:8}{link:8}{each.address:16}{labels}")
    return "\n".join(lines)


def build_images() -> None:
    """Build the project's images, and all other changed parts, for the next start and for tests."""
    setup(*toolchain.FOR_TESTS)


def load_images() -> None:
    """Build the project's images and load them into every node with power; pods created afterwards run them."""
    known = record.present()
    powered = [each for each in topology.read(known.topology).nodes if each.name in known.nodes]
    with record.building("images load"):
        built = [(image, images.build(image)) for image in images.own()]
    for image, manifest in built:

        def load(each: topology.Node, image: images.Image = image, manifest: str = manifest) -> bool:
            ctr = [
                "nsenter",
                "--all",
                f"--target={known.nodes[each.name].pid}",
                f"{paths.programs()}/ctr",
                "--namespace=k8s.io",
            ]
            if manifest in run(*ctr, "images", "list", f"name=={image.reference}").split():
                return False
            template.load(image, node.folder(each) / "var/lib/containerd", ctr)
            return True

        started_s = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            loaded = sum(pool.map(load, powered))
        if loaded:
            say(f"    heterotrain/{image.name} loaded into {loaded} nodes: {time.monotonic() - started_s:.1f} s")
