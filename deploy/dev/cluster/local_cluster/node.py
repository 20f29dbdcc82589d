"""A node's power: its first process, its folder, and its links to the template's images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import asdict
from pathlib import Path

from local_cluster import cgroups, network, paths, record, services
from local_cluster.process import Problem, ProcessId, child_of, run, wait_until
from local_cluster.topology import Node, Topology

CAP_SYS_RESOURCE = 24


def folder(node: Node) -> Path:
    """Return the folder with the node's files that survive a power cut."""
    return paths.cluster() / "nodes" / node.name


def power_on(node: Node, topology: Topology) -> None:
    """Start the node.

    Raises:
        Problem: it already has power, or its first process ended during the setup.
    """
    known = record.present()
    if node.name in known.nodes and known.nodes[node.name].is_alive:
        raise Problem(f"node {node.name} already has power")
    network.disconnect(node.host_device)
    for mount in node.mounts:
        _shared_folder(Path(mount.host_path))
    home = folder(node)
    home.mkdir(parents=True, exist_ok=True)
    with (home / "init.log").open("ab") as log:
        launcher = subprocess.Popen(
            [
                "unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc",
                sys.executable, "-I", "-S", str(paths.LOCAL / "local_cluster/node_init.py"),
            ],
            stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/", start_new_session=True,
        )  # fmt: skip
    # The first process waits for its instructions and ends if this process ends before: no unrecorded process remains.
    wait_until(
        lambda: launcher.poll() is not None or child_of(launcher.pid) is not None,
        f"{node.name} to start",
        timeout_s=10,
        every_s=0.005,
    )
    pid = child_of(launcher.pid)
    if pid is None:
        raise Problem(f"node {node.name} did not start: {(home / 'init.log').read_text()[-500:]}")
    process = ProcessId.of(pid)
    record.update(lambda known: known.with_node(node.name, process))
    network.connect(node, topology, pid=pid)
    instructions = json.dumps(_instructions(node, topology)).encode()
    assert launcher.stdin is not None  # noqa: S101  # it is a pipe
    launcher.stdin.write(instructions)
    launcher.stdin.close()


def power_off(node: Node) -> None:
    """Cut the network link, then the power; in the other order the kernel would still close the connections."""
    known = record.present()
    process = known.nodes.get(node.name)
    if process is None:
        raise Problem(f"node {node.name} has no power")
    if process.is_alive:
        network.unplug(node)
        process.kill()
    network.disconnect(node.host_device)
    record.update(lambda known: known.with_node(node.name, None))


def inside(node: Node, *command: str | Path, stdin: str | None = None, timeout_s: float = 120) -> str:
    """Run a command in the node's namespaces and return what it printed."""
    process = record.present().nodes.get(node.name)
    if process is None or not process.is_alive:
        raise Problem(f"node {node.name} has no power")
    return run("nsenter", "--all", f"--target={process.pid}", *command, stdin=stdin, timeout_s=timeout_s)


def link_images(node: Node, template: Path) -> None:
    """Link the template's images into the node's storage, which takes no time, no disk and no memory per node.

    Committed snapshots are only ever lower layers, so symbolic links to the template's serve each node. Blobs never
    change in place, so hard links serve them. Only the databases are copied, because nodes write them. The template
    must not change while nodes use it.
    """
    target = folder(node) / "var/lib/containerd"
    for top, folders, files in os.walk(template):
        here, there = Path(top), target / Path(top).relative_to(template)
        there.mkdir(parents=True, mode=here.stat().st_mode & 0o7777)
        if here.name == "snapshots":
            for name in folders:
                (there / name).symlink_to(here / name)
            folders.clear()
        for name in files:
            if name.endswith(".db"):
                shutil.copy2(here / name, there / name)
            else:
                (there / name).hardlink_to(here / name)


def machine() -> services.Machine:
    """Return the capabilities of this machine."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return services.Machine(
        may_protect_from_oom=bool(int(status["CapEff"], 16) >> CAP_SYS_RESOURCE & 1),
        has_cgroup_v2=cgroups.is_version_2(),
    )


def _instructions(node: Node, topology: Topology) -> dict[str, object]:
    setup = services.of(
        node,
        topology,
        machine=machine(),
        programs=paths.programs(),
        pki=paths.cluster() / "pki",
        cgroup=cgroups.create_branch(node.name),
    )
    return {
        "name": node.name,
        "folder": str(folder(node)),
        "cache": str(paths.cache()),
        "path": f"{paths.programs()}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "mounts": [asdict(mount) for mount in node.mounts],
        # A new boot_id makes a node that was powered on again report a reboot.
        "private_sysctls": {**services.MACHINE_WIDE_SYSCTLS, "kernel/random/boot_id": f"{uuid.uuid4()}\n"},
        **asdict(setup),
    }


def _shared_folder(path: Path) -> None:
    """Create a folder that the nodes share, writable for pods of any user, if it does not exist yet."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:  # nodes start in parallel: another one may have just created it
        return
    os.chmod(path, 0o1777)  # noqa: PTH101, S103  # like /tmp: pods run as users of their own
