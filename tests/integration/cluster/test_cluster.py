"""The emulated cluster itself: it starts, pods reach each other, nodes lose power and cables, and nothing stays behind.

These tests start and end the machine's cluster, so none may be running. On kind they are skipped: there Docker does
what they look at.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_cluster import cgroups, control, kind, lifecycle, network, paths, record, topology
from local_cluster.process import Problem, run

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),  # the first test builds what is not built yet
    pytest.mark.skipif(
        os.geteuid() != 0 or kind.is_available(), reason="deploy/dev/cluster needs root, and kind is preferred"
    ),
]

PROBE = """
import socket, sys, time, urllib.request
for _ in range(200):  # one node's kube-proxy may lag behind the others
    try:
        answers = {urllib.request.urlopen(f"http://{sys.argv[1]}:8000/name", timeout=2).read().decode().strip() for _ in range(40)}
        if len(answers) >= int(sys.argv[2]):
            print(socket.gethostbyname(sys.argv[1]), *sorted(answers))
            break
    except OSError as error:
        print(error, file=sys.stderr)
    time.sleep(0.1)
"""


def wait_for(probe: Callable[[], Any], what: str, timeout_s: float = 90) -> None:
    """Return when the probe is true; a command that fails meanwhile is "not yet"."""
    deadline_s, last = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline_s:
        try:
            if probe():
                return
        except Problem as error:
            last = str(error)
        time.sleep(0.2)
    pytest.fail(f"waited {timeout_s:.0f} s in vain for {what} {last}")


def get(*arguments: str) -> Any:
    """Return an object or a list from the API."""
    return json.loads(lifecycle.kubectl("get", "-o", "json", *arguments))


def conditions(node: str) -> dict[str, str]:
    """Return the status of each of the node's conditions."""
    return {each["type"]: each["status"] for each in get("node", node)["status"]["conditions"]}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a person does."""
    return subprocess.run(
        [sys.executable, "-m", "local_cluster", *words],
        env={**os.environ, "PYTHONPATH": str(paths.LOCAL)},
        text=True,
        capture_output=True,
        check=False,
    )


def traces() -> dict[str, Any]:
    """What a cluster could leave on the machine."""
    programs, init = str(paths.programs()), str(paths.LOCAL / "local_cluster/node_init.py")
    sysctls = {}
    for top in ("vm", "kernel", "net/ipv4/conf/all", "net/ipv4/conf/default"):
        for path in sorted(Path("/proc/sys", top).rglob("*")):
            if (
                path.name
                in {"overcommit_memory", "panic", "panic_on_oops", "panic_on_oom", "root_maxkeys", "root_maxbytes"}
                or "conf" in top
            ):
                sysctls[str(path)] = path.read_text() if os.access(path, os.R_OK) and path.is_file() else ""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if programs in line or init in line:
            processes.append(line)
    return {
        "devices": sorted(name for _, name in socket.if_nameindex()),
        "mounts": sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "branches": sorted(
            str(top / cgroups.BRANCH) for top in cgroups.hierarchies() if (top / cgroups.BRANCH).exists()
        ),
        "sysctls": sysctls,
        "processes": processes,
        "folder": paths.cluster().exists(),
        "routes": run("ip", "route"),
        "rules": run("nft", "list", "ruleset"),
    }


@pytest.fixture(scope="module", autouse=True)
def before() -> Iterator[dict[str, Any]]:
    """What there is without a cluster."""
    known = record.load()
    if known is not None and known.is_alive:
        pytest.fail("a cluster is running: end it with `make cluster-down`, these tests start their own")
    lifecycle.setup()
    lifecycle.down()
    yield traces()
    lifecycle.down()


@pytest.fixture(scope="module")
def cluster(before: dict[str, Any]) -> topology.Topology:
    """The running cluster."""
    lifecycle.up()
    return topology.read(record.present().topology)


@pytest.fixture(scope="module")
def web(cluster: topology.Topology) -> str:
    """A Service with one server on each worker, which answers with its node's name."""
    command_line = (
        'mkdir -p /tmp/www && echo "$NODE" > /tmp/www/name && exec python3 -m http.server --directory /tmp/www 8000'
    )
    container = {
        "name": "web", "image": "heterotrain/operator:dev", "imagePullPolicy": "Never", "command": ["sh", "-c", command_line],
        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "readinessProbe": {"httpGet": {"port": 8000, "path": "/name"}, "periodSeconds": 1},
    }  # fmt: skip
    labels = {"app": "web"}
    objects = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {"selector": labels, "ports": [{"port": 8000}]}},
        {
            "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "web"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}},
            },
        },
    ]  # fmt: skip
    for each in objects:
        run(
            paths.programs() / "kubectl",
            "--kubeconfig",
            paths.kubeconfig(),
            "apply",
            "-f",
            "-",
            stdin=json.dumps(each),
        )
    lifecycle.kubectl("rollout", "status", "daemonset/web", "--timeout=60s")
    return "web.default.svc.cluster.local"


def ask(node: str, host: str, *, answers: int) -> list[str]:
    """Return what a pod on ``node`` hears from the Service: its address, then the nodes that answered."""
    pod = f"ask-{node}"
    spec = {
        "nodeName": node, "restartPolicy": "Never",
        "containers": [{
            "name": "ask", "image": "heterotrain/operator:dev", "imagePullPolicy": "Never",
            "command": ["python3", "-c", PROBE, host, str(answers)],
        }],
    }  # fmt: skip
    body = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": spec})
    run(paths.programs() / "kubectl", "--kubeconfig", paths.kubeconfig(), "create", "-f", "-", stdin=body)
    wait_for(lambda: get("pod", pod)["status"]["phase"] == "Succeeded", f"pod {pod} to end")
    words = lifecycle.kubectl("logs", pod).split()
    lifecycle.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    return words


def workers(cluster: topology.Topology) -> list[str]:
    """Return the names of the nodes that pods may stand on."""
    return [node.name for node in cluster.nodes if not node.is_control_plane]


def test_every_node_of_the_file_is_ready_with_its_labels(cluster: topology.Topology) -> None:
    """Nodes, labels, taints and kubelet settings are those of kind-config.yaml."""
    found = {each["metadata"]["name"]: each for each in get("nodes")["items"]}
    assert set(found) == {node.name for node in cluster.nodes}
    for node in cluster.nodes:
        assert conditions(node.name)["Ready"] == "True"
        assert node.labels.items() <= found[node.name]["metadata"]["labels"].items()
        taints = [
            f"{each['key']}={each.get('value', '')}:{each['effect']}"
            for each in found[node.name]["spec"].get("taints", ())
        ]
        # The controller takes its own "not ready" away a moment later.
        assert tuple(taint for taint in taints if not taint.startswith("node.kubernetes.io/")) == node.taints
        kubelet = json.loads(lifecycle.kubectl("get", "--raw", f"/api/v1/nodes/{node.name}/proxy/configz"))[
            "kubeletconfig"
        ]
        assert cluster.kubelet.items() <= kubelet.items()
    assert {node.labels.get("heterotrain.dev/pool") for node in cluster.nodes} >= {"a100", "v100", "t4"}


def test_pods_reach_each_other_on_all_nodes_by_name(cluster: topology.Topology, web: str) -> None:
    """From every worker the Service is found by DNS and its pods answer on every worker, the own one included."""
    for node in workers(cluster):
        address, *answered = ask(node, web, answers=len(workers(cluster)))
        assert address.startswith("10.96.")
        assert answered == sorted(workers(cluster))


def test_the_quota_period_is_that_of_the_file(cluster: topology.Topology) -> None:
    """A pod's CPU limit is enforced in periods of 10 ms, so that a slow device looks slow and not bursty."""
    spec = {
        "containers": [{
            "name": "limited", "image": "heterotrain/operator:dev", "imagePullPolicy": "Never", "command": ["sleep", "3600"],
            "resources": {"limits": {"cpu": "200m"}},
        }],
        "terminationGracePeriodSeconds": 0,
    }  # fmt: skip
    body = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "limited"}, "spec": spec})
    run(paths.programs() / "kubectl", "--kubeconfig", paths.kubeconfig(), "create", "-f", "-", stdin=body)
    lifecycle.kubectl("wait", "--for=condition=Ready", "pod/limited", "--timeout=30s")
    read = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu/cpu.cfs_period_us 2>/dev/null || cat /sys/fs/cgroup/cpu.max"
    assert lifecycle.kubectl("exec", "limited", "--", "sh", "-c", read).split() == ["2000", "10000"]
    lifecycle.kubectl("delete", "pod", "limited", "--wait=false")


def test_nodes_share_the_folder_of_the_file(cluster: topology.Topology) -> None:
    """What one node writes below the shared folder, another node reads."""
    mount = next(mount for node in cluster.nodes for mount in node.mounts)
    sharing = [node for node in cluster.nodes if node.mounts]
    process = record.present().nodes
    name = Path(mount.node_path, f"test-{os.getpid()}")
    run("nsenter", "--all", f"--target={process[sharing[0].name].pid}", "tee", name, stdin="hello")
    try:
        assert run("nsenter", "--all", f"--target={process[sharing[1].name].pid}", "cat", name) == "hello"
    finally:
        Path(mount.host_path, name.name).unlink()


def test_a_second_start_is_refused_in_one_sentence(cluster: topology.Topology) -> None:
    """`up` on a running cluster changes nothing and says what to do."""
    known = record.present()
    second = command("up")
    assert second.returncode == 1
    assert second.stderr.strip() == (
        "problem: a cluster is running already: use it, or end it with `make cluster-down` first"
    )
    assert record.present() == known
    assert command("up", "--reuse").returncode == 0


def test_a_node_loses_power_and_comes_back(cluster: topology.Topology, web: str) -> None:
    """Everything on the node is gone at once; with power it reboots, and its pods are started again."""
    node = next(node for node in cluster.nodes if node.labels.get("heterotrain.dev/pool") == "t4")
    selector = ["pods", "-l", "app=web", "--field-selector", f"spec.nodeName={node.name}"]
    first = get("node", node.name)["status"]["nodeInfo"]["bootID"]
    assert get(*selector)["items"][0]["status"]["containerStatuses"][0]["restartCount"] == 0

    process = record.present().nodes[node.name]
    control.power_off(node.name)
    assert not process.is_alive
    assert not network.is_plugged(node)
    with pytest.raises(Problem, match="no power"):
        control.plug(node.name)

    control.power_on(node.name)
    wait_for(lambda: get("node", node.name)["status"]["nodeInfo"]["bootID"] != first, "the node to report a reboot")
    wait_for(lambda: conditions(node.name)["Ready"] == "True", "the node to be Ready")
    wait_for(
        lambda: (state := get(*selector)["items"][0]["status"]["containerStatuses"][0])["restartCount"] == 1 and state["ready"],
        "the pod to be started again",
    )  # fmt: skip
    assert node.name in ask(workers(cluster)[0], web, answers=len(workers(cluster)))


def test_a_cable_is_pulled_and_plugged(cluster: topology.Topology, web: str) -> None:
    """Without its cable a node runs on unheard and is given up; plugged in again it is back without a restart."""
    node = next(node for node in cluster.nodes if node.labels.get("heterotrain.dev/pool") == "v100")
    process = record.present().nodes[node.name]
    control.unplug(node.name)
    wait_for(lambda: conditions(node.name)["Ready"] == "Unknown", "the node to be given up", timeout_s=120)
    assert process.is_alive
    control.plug(node.name)
    wait_for(lambda: conditions(node.name)["Ready"] == "True", "the node to be Ready", timeout_s=60)
    assert record.present().nodes[node.name] == process
    assert node.name in ask(workers(cluster)[0], web, answers=len(workers(cluster)))


def test_nothing_stays_behind(before: dict[str, Any], cluster: topology.Topology) -> None:
    """After `down` mounts, devices, routes, control groups, sysctls and processes are what they were, pods or not."""
    assert traces()["branches"] != []
    assert command("down").returncode == 0
    assert traces() == before
    assert command("down").returncode == 0
    assert "no cluster is running" in command("kubeconfig").stderr


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_start_that_is_broken_off_leaves_nothing(before: dict[str, Any], ending: signal.Signals) -> None:
    """Ctrl-C takes back what was there; after a crash `down` does, from what was written down."""
    # A shell that starts the tests in the background has them ignore SIGINT, and whom they start would inherit that.
    with subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "local_cluster", "up"],
        env={**os.environ, "PYTHONPATH": str(paths.LOCAL)},
        stderr=subprocess.DEVNULL,
    ) as process:
        wait_for(
            lambda: (known := record.load()) is not None and len(known.nodes) == len(control.nodes()),
            "all nodes to have power",
        )
        process.send_signal(ending)
        process.wait(timeout=60)
    if ending == signal.SIGKILL:
        assert traces()["processes"] != []
        assert command("down").returncode == 0
    assert traces() == before
