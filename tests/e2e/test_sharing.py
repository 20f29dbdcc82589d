"""Two jobs compete for the same devices: one gives a worker to the other and gets it back after the other's end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending, decode_outcome
from lab import spot_node
from lab.cluster import Cluster, wait_for

if TYPE_CHECKING:
    from conftest import Running, Start

DEVICE = "lab.heterotrain.dev/device"
DEVICES = 3
POOL = "shared"
TYPO = "heterotrain/trainer:typo"
EPOCH_SAMPLES = 560
WHY_FEWER = ("other jobs need them more", "% speed")
"""Reasons for a worker less. On a busy machine, three may be slower than two: then that is the reason given."""


@pytest.fixture
def devices(installed: Cluster) -> Iterator[None]:
    """Advertise a few devices on the node of pool a100, as a device plugin would."""
    node = spot_node.node_of_pool(installed, "a100")
    amounts = {DEVICE: str(DEVICES)}
    _advertise(installed, node, amounts)
    try:
        yield
    finally:
        _advertise(installed, node, dict.fromkeys(amounts))


def _advertise(cluster: Cluster, node: str, amounts: Mapping[str, str | None]) -> None:
    patch = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
    cluster.run("kubectl", "patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)


def workers(most: int, *, least: int) -> dict[str, Any]:
    """Return the part of a spec that requests workers with one device each."""
    resources = {
        "requests": {"cpu": "100m", "memory": "256Mi", DEVICE: "1"},
        "limits": {"cpu": "1", "memory": "1536Mi", DEVICE: "1"},
    }
    pool = {
        "name": POOL,
        "maxReplicas": most,
        "nodeSelector": {keys.LABEL_POOL: "a100"},
        "resources": resources,
    }
    return {"workerPools": [pool], "elasticPolicy": {"minReplicas": least, "maxReplicas": most}}


@contextmanager
def watched(running: Running, path: Path) -> Iterator[None]:
    """Record every state of the job's pods in a file, because an ended pod is soon deleted."""
    command = ["kubectl", "-n", running.job.cluster.namespace, "get", "pods", "--watch", "-o", "json"]
    selector = ["-l", f"{keys.LABEL_JOB}={running.job.name}"]
    file: IO[str]
    with path.open("w") as file:
        watch = subprocess.Popen([*command, *selector], env=dict(running.job.cluster.environment), stdout=file)
        try:
            wait_for(lambda: path.stat().st_size, "the watch to begin", timeout_s=30)
            yield
        finally:
            watch.terminate()
            watch.wait()


def endings(path: Path) -> dict[str, Ending | None]:
    """Return the ending of each ended pod by its uid, without a record that is still being written."""
    text, position, found = path.read_text(), 0, {}
    while position < len(text):
        try:
            pod, position = json.JSONDecoder().raw_decode(text, position)
        except ValueError:
            break
        position += 1
        for each in pod.get("status", {}).get("containerStatuses", []):
            if ended := each.get("state", {}).get("terminated"):
                outcome = decode_outcome(ended.get("message", ""))
                found[pod["metadata"]["uid"]] = outcome.ending if outcome else None
    return found


def event_messages(running: Running) -> dict[str, list[str]]:
    """Return the messages of the job's events by reason."""
    found: dict[str, list[str]] = {}
    for event in running.job.cluster.list("events"):
        about = event["involvedObject"]
        if (about["kind"], about["name"]) == (keys.KIND, running.job.name):
            found.setdefault(event["reason"], []).append(event["message"])
    return found


def granted(running: Running) -> int | None:
    """Return the number of workers granted to the job; ``None`` while no other job competes for its nodes."""
    pools = running.job.status().get("pools", [])
    return next((pool.get("granted") for pool in pools), None)


def stop_undisturbed(running: Running) -> None:
    """Stop the job and check that no failure and no disruption was counted."""
    running.stop()
    status = running.job.status()
    assert (status["restarts"], status["disruptions"]) == (0, 0), running.job.name


@pytest.mark.usefixtures("devices")
def test_a_worker_goes_to_another_job_and_comes_back(start: Start, tmp_path: Path) -> None:
    """A job on three devices gives one to a new job after a step, and gets it back after that job's end."""

    def start_job(name: str, most: int, *, least: int) -> Running:
        return start(name, spec=workers(most, least=least), epochs=None, epoch_samples=EPOCH_SAMPLES)

    first = start_job("first", DEVICES, least=2)
    plan = first.job.wait_members(DEVICES, timeout_s=180)
    names = {rank.worker_uid: rank.worker for rank in plan.ranks}
    assert granted(first) is None, "a single job uses everything that fits"

    states = tmp_path / "pods.json"
    with watched(first, states):
        second = start_job("second", 1, least=1)
        smaller = first.job.wait_members(DEVICES - 1, timeout_s=180)
        second.job.wait_members(1, timeout_s=180)
        second.wait_steps(3)
        limited = first.job.condition("WorkersLimited")
        assert (limited["status"], limited["reason"]) == ("True", "NodesShared")
        assert limited["message"].startswith("-1 ")
        assert any(why in limited["message"] for why in WHY_FEWER), limited
        assert (granted(first), granted(second)) == (DEVICES - 1, 1)
        stop_undisturbed(second)

        larger = first.job.wait_members(DEVICES, timeout_s=180)
        first.wait_steps(first.steps() + 3)
        (left,) = set(names) - {rank.worker_uid for rank in smaller.ranks}
        assert endings(states) == {left: Ending.LEFT}, "it shut down gracefully, and no other worker ended"
    assert plan.generation < smaller.generation < larger.generation
    stop_undisturbed(first)

    messages = event_messages(first)
    removed = [text for text in messages["WorkersRemoved"] if names[left] in text]
    assert any(why in text for why in WHY_FEWER for text in removed), messages
    assert any("no other job wants its nodes" in text for text in messages["WorkersAllocated"])
    assert messages.keys().isdisjoint({"WorkerFailed", "WorkerDisrupted", "TrainingInterrupted"}), messages
    assert "WorkersAllocated" in event_messages(second)
