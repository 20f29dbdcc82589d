"""From nothing to a cluster whose nodes are Ready, and back to nothing."""

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


def setup() -> None:
    """Install and build everything that starting a cluster needs. A second run finds nothing to do."""
    if os.geteuid() != 0:
        raise Problem(
            "a cluster without Docker needs root: run this as root, or start a Docker engine and install kind"
        )
    with record.building("setup"):
        toolchain.install_packages()
        # Compiling keeps the processors busy, packing PyTorch the disk.
        with ThreadPoolExecutor(1) as beside:
            programs = beside.submit(toolchain.build_programs)
            for image in images.own():
                images.build(image)
            programs.result()
        for image in images.of_cluster():
            images.build(image)


def up(*, reuse: bool = False) -> None:
    """Start the cluster and return when its nodes and its DNS are ready.

    Args:
        reuse: be content with a cluster that runs already.

    Raises:
        Problem: one is running, or something of it did not start; then nothing is left of it.
    """
    with record.exclusively("up"):
        known = record.load()
        if known is not None and known.is_up and known.is_alive:
            if reuse:
                return
            raise Problem("a cluster is running already: use it, or end it with `make cluster-down` first")
        setup()
        _clear()
        with record.building("up"):  # what is left of a cluster uses the template: not before it has gone
            template.fill([*images.of_cluster(), *images.own()])
        started_s = time.monotonic()
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            _start(CONFIGURATION.read_text())
        except BaseException:
            say("    the start did not get to its end: taking away what was there")
            _clear()
            raise
        say(
            f"    the cluster is ready after {time.monotonic() - started_s:.1f} s: export KUBECONFIG={paths.kubeconfig()}"
        )


def down() -> None:
    """End the cluster, or what a crash has left of one; none is no error."""
    with record.exclusively("down"):
        _clear()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start(text: str) -> None:
    plan = topology.read(text)
    record.save(record.Record(topology=text))
    with step("network and certificates"):
        network.lay_out(plan)
        pki.issue(paths.cluster() / "pki", plan)
        shutil.copy2(paths.cluster() / "pki/admin.kubeconfig", paths.kubeconfig())
    with step(f"{len(plan.nodes)} nodes"), ThreadPoolExecutor(len(plan.nodes)) as pool:

        def begin(each: topology.Node) -> None:
            node.furnish(each, template.root())
            node.power_on(each, plan)

        # The control plane first: everyone waits for it.
        begin(plan.control_plane)
        list(pool.map(begin, [each for each in plan.nodes if not each.is_control_plane]))
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
    """Call our kubectl as the cluster's administrator."""
    return run(paths.programs() / "kubectl", "--kubeconfig", paths.kubeconfig(), *arguments)


def _answers(*arguments: str) -> bool:
    try:
        kubectl(*arguments, "--request-timeout=5s")
    except Problem:
        return False
    return True


def _clear() -> None:
    """Take away everything that the record knows of, and everything that carries our names."""
    known = record.load()
    if known is not None:
        for process in known.nodes.values():
            process.kill()
    for device in network.devices():
        network.disconnect(device)
    cgroups.fell()
    folder = paths.cluster()
    if folder.exists():
        # The record goes last: after a crash in the middle it is still known what there was.
        for path in sorted(folder.iterdir(), key=lambda path: path.name.startswith("record")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.rmdir()


def status() -> str:
    """Return a table of the nodes: power, cable, address, labels.

    Raises:
        Problem: no cluster is running.
    """
    known = record.present()
    plan = topology.read(known.topology)
    lines = [f"{'NODE':28}{'POWER':8}{'CABLE':8}{'ADDRESS':16}LABELS"]
    for each in plan.nodes:
        process = known.nodes.get(each.name)
        power = "on" if process is not None and process.is_alive else "off"
        cable = "in" if network.is_plugged(each) else "out"
        labels = ",".join(f"{key}={value}" for key, value in each.labels.items())
        lines.append(f"{each.name:28}{power:8}{cable:8}{each.address:16}{labels}")
    return "\n".join(lines)


def build_images() -> None:
    """Build the project's images, and whatever else has changed, for the next start."""
    setup()


def load_images() -> None:
    """Build the project's images and give them to every node that has power; pods made from now on run them."""
    known = record.present()
    powered = [each for each in topology.read(known.topology).nodes if each.name in known.nodes]
    with record.building("images load"):
        built = [(image, images.build(image)) for image in images.own()]
    for image, manifest in built:

        def give(each: topology.Node, image: images.Image = image, manifest: str = manifest) -> bool:
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
            given = sum(pool.map(give, powered))
        if given:
            say(f"    heterotrain/{image.name} loaded into {given} nodes: {time.monotonic() - started_s:.1f} s")
