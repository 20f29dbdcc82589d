"""The emulated cluster itself: start, connections between pods, loss of power and network, and a complete removal.

These tests start and stop the machine's cluster, so none may be running. They are skipped where kind is available,
because the cluster's work is Docker's there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_cluster import cgroups, control, kind, lifecycle, network, paths, record, topology
from local_cluster.process import Problem, run
from support.waiting import wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),  # the first test builds missing programs and images
    pytest.mark.skipif(
        os.geteuid() != 0 or kind.is_available(), reason="deploy/dev/cluster needs root, and kind is preferred"
    ),
]

PROBE = """
import socket, sys, time, urllib.request
for _ in range(200):  # one node's kube-proxy may lag behind the others
    try:
        replies = [urllib.request.urlopen(f"http://{sys.argv[1]}:8000/name", timeout=2).read() for _ in range(40)]
        answers = {reply.decode().strip() for reply in replies}
        if len(answers) >= int(sys.argv[2]):
            print(socket.getaddrinfo(sys.argv[1], 8000)[0][4][0], *sorted(answers))
            break
    except OSError as error:
        print(error, file=sys.stderr)
    time.sleep(0.1)
"""


def wait_for(probe: Callable[[], Any], what: str, timeout_s: float = 180) -> None:
    """Wait until the probe is true; a failing command counts as "not yet"."""
    last = ""

    def holds() -> bool:
        nonlocal last
        try:
            return bool(probe())
        except Problem as error:
            last = str(error)
            return False

    wait_until(holds, what, timeout_s=timeout_s, every_s=0.2, evidence=lambda: last)


def get(*arguments: str) -> Any:
    """Return an object or a list from the API."""
    return json.loads(lifecycle.kubectl("get", "-o", "json", *arguments))


def conditions(node: str) -> dict[str, str]:
    """Return the status of each of the node's conditions."""
    return {each["type"]: each["status"] for each in get("node", node)["status"]["conditions"]}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the launcher as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "local_cluster", *words],
        env={**os.environ, "PYTHONPATH": str(paths.LOCAL)},
        text=True,
        capture_output=True,
        check=False,
    )


CLIENTS = {"helm", "kubectl", "promtool"}
"""Programs of the cache that other work may run meanwhile, such as tests of the chart; the cluster consists of none."""


def traces() -> dict[str, Any]:
    """Return everything that a cluster could leave on the machine."""
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
        short_lived = Path(line.partition(" ")[0]).name in CLIENTS
        if (programs in line and not short_lived) or init in line:
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
    """Yield the machine's state without a cluster."""
    known = record.load()
    if known is not None and known.is_alive:
        pytest.fail("a cluster is running: end it with `make cluster-down`, because these tests start their own")
    lifecycle.setup()
    lifecycle.down()
    yield traces()
    lifecycle.down()


@pytest.fixture(scope="module")
def cluster(before: dict[str, Any]) -> topology.Topology:
    """Start the cluster and return its topology."""
    lifecycle.up()
    return topology.read(record.present().topology)


@pytest.fixture(scope="module")
def web(cluster: topology.Topology) -> str:
    """Create a Service with one server per worker node, which answers with the node's name; return the host name."""
    command_line = (
        'mkdir -p /tmp/www && echo "$NODE" > /tmp/www/name && '
        "exec python3 -m http.server --bind :: --directory /tmp/www 8000"
    )
    container = {
        "name": "web",
        "image": "heterotrain/operator:dev",
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", command_line],
        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "readinessProbe": {"httpGet": {"port": 8000, "path": "/name"}, "periodSeconds": 1},
    }
    labels, metadata = {"app": "web"}, {"name": "web"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}}
    service = {"selector": labels, "ports": [{"port": 8000}]}
    service_6 = {**service, "ipFamilies": ["IPv6"]}
    servers = {"selector": {"matchLabels": labels}, "template": pod}
    submit("apply", {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service})
    submit("apply", {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web-6"}, "spec": service_6})
    submit("apply", {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata, "spec": servers})
    lifecycle.kubectl("rollout", "status", "daemonset/web", "--timeout=180s")
    return "web.default.svc.cluster.local"


def submit(verb: str, manifest: dict[str, Any]) -> None:
    """Create or apply an object."""
    kubectl = [paths.programs() / "kubectl", "--kubeconfig", paths.kubeconfig()]
    run(*kubectl, verb, "-f", "-", stdin=json.dumps(manifest))


def ask(node: str, host: str, *, answers: int) -> list[str]:
    """Ask the Service from a pod on ``node``; return the Service's address and the names of the nodes that answered."""
    pod = f"ask-{node}"
    spec = {
        "nodeName": node, "restartPolicy": "Never",
        "containers": [{
            "name": "ask", "image": "heterotrain/operator:dev", "imagePullPolicy": "Never",
            "command": ["python3", "-c", PROBE, host, str(answers)],
        }],
    }  # fmt: skip
    submit("create", {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}, "spec": spec})
    wait_for(lambda: get("pod", pod)["status"]["phase"] == "Succeeded", f"pod {pod} to end")
    *_, answer = lifecycle.kubectl("logs", pod).splitlines()  # failed attempts come first
    lifecycle.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    return answer.split()


def workers(cluster: topology.Topology) -> list[str]:
    """Return the names of the nodes that run pods."""
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
        # The controller removes its own "not ready" a moment later.
        assert tuple(taint for taint in taints if not taint.startswith("node.kubernetes.io/")) == node.taints
        kubelet = json.loads(lifecycle.kubectl("get", "--raw", f"/api/v1/nodes/{node.name}/proxy/configz"))[
            "kubeletconfig"
        ]
        assert cluster.kubelet.items() <= kubelet.items()
    assert {node.labels.get("heterotrain.dev/pool") for node in cluster.nodes} >= {"a100", "v100", "t4"}


def test_pods_reach_each_other_on_all_nodes_by_name(cluster: topology.Topology, web: str) -> None:
    """From every worker node, DNS resolves the Service and its pods on all worker nodes answer, over IPv6, too."""
    last = workers(cluster)[-1]
    of_both = [(node, web, "10.96.") for node in workers(cluster)] + [(last, web.replace("web", "web-6"), "fd10:96:")]
    for node, host, subnet in of_both:
        address, *answered = ask(node, host, answers=len(workers(cluster)))
        assert address.startswith(subnet)
        assert answered == sorted(workers(cluster))


def test_the_quota_period_is_that_of_the_file(cluster: topology.Topology) -> None:
    """A pod's CPU limit is enforced in periods of 10 ms, so that a slow device looks slow and not bursty."""
    container = {
        "name": "limited",
        "image": "heterotrain/operator:dev",
        "imagePullPolicy": "Never",
        "command": ["sleep", "3600"],
        "resources": {"limits": {"cpu": "200m"}},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    submit("create", {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "limited"}, "spec": spec})
    lifecycle.kubectl("wait", "--for=condition=Ready", "pod/limited", "--timeout=120s")
    version_1 = "cd /sys/fs/cgroup/cpu && cat cpu.cfs_quota_us cpu.cfs_period_us"
    read = f"({version_1}) 2>/dev/null || cat /sys/fs/cgroup/cpu.max"
    assert lifecycle.kubectl("exec", "limited", "--", "sh", "-c", read).split() == ["2000", "10000"]
    lifecycle.kubectl("delete", "pod", "limited", "--wait=false")


def test_nodes_share_the_folder_of_the_file(cluster: topology.Topology) -> None:
    """A file that one node writes below the shared folder is visible on another node."""
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
    """`up` on a running cluster changes nothing, and its message names the options."""
    known = record.present()
    second = command("up")
    assert second.returncode == 1
    assert second.stderr.strip() == (
        "problem: a cluster is running already: use it, or end it with `make cluster-down` first"
    )
    assert record.present() == known
    assert command("up", "--reuse").returncode == 0


def test_a_node_loses_power_and_comes_back(cluster: topology.Topology, web: str) -> None:
    """All processes of the node end at once; with power it reboots, and its pods are restarted."""
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

    def restarted() -> bool:
        state = get(*selector)["items"][0]["status"]["containerStatuses"][0]
        return bool(state["restartCount"] == 1 and state["ready"])

    wait_for(restarted, "the pod to be restarted")
    assert node.name in ask(workers(cluster)[0], web, answers=len(workers(cluster)))


def test_a_network_link_is_cut_and_restored(cluster: topology.Topology, web: str) -> None:
    """An isolated node keeps running and becomes Unknown; with its link restored it is Ready without a restart."""
    node = next(node for node in cluster.nodes if node.labels.get("heterotrain.dev/pool") == "v100")
    process = record.present().nodes[node.name]
    control.unplug(node.name)
    wait_for(lambda: conditions(node.name)["Ready"] == "Unknown", "the node to be Unknown", timeout_s=240)
    assert process.is_alive
    control.plug(node.name)
    wait_for(lambda: conditions(node.name)["Ready"] == "True", "the node to be Ready")
    assert record.present().nodes[node.name] == process
    assert node.name in ask(workers(cluster)[0], web, answers=len(workers(cluster)))


def test_nothing_stays_behind(before: dict[str, Any], cluster: topology.Topology) -> None:
    """`down` restores mounts, devices, routes, control groups, sysctls and processes, with pods still running."""
    assert traces()["branches"] != []
    assert command("down").returncode == 0
    assert traces() == before
    assert command("down").returncode == 0
    assert "no cluster is running" in command("kubeconfig").stderr


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_start_leaves_nothing(before: dict[str, Any], ending: signal.Signals) -> None:
    """Ctrl-C removes the incomplete cluster; after a crash `down` removes it, with the record."""
    # A shell makes background processes ignore SIGINT, and their children would inherit that.
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
        process.wait(timeout=180)
    if ending == signal.SIGKILL:
        assert traces()["processes"] != []
        assert command("down").returncode == 0
    assert traces() == before
