"""Nodes, their kubelets, the scheduler and the controllers of the control plane, in steps of one second."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending, Outcome, encode_outcome
from heterotrain_operator.cluster_state.parse import parse_pod, rfc3339
from heterotrain_operator.cluster_state.quantity import quantities

from support.chaos.api_server import ApiServer, Body
from support.chaos.training import JobTraining, Process

SILENT_S = 40.0
"""The control plane declares a node unreachable after this many seconds without its kubelet."""
POD_GC_S = 20.0
"""Seconds between two runs of the collectors of garbage and of pods without a node."""


@dataclass
class Machine:
    """One node with its kubelet.

    Attributes:
        power: whether the machine runs; without it, its processes are gone.
        kubelet: whether the kubelet runs and reaches the API server.
        skew_s: seconds by which its clock is ahead.
        silent_since_s: since when the control plane has not heard from the kubelet.
        started: by uid of a pod, when its container is ready.
        endings: by uid, the final state of the container that the kubelet has to report.
    """

    name: str
    pool: str
    cores: int
    skew_s: float
    power: bool = True
    kubelet: bool = True
    silent_since_s: float | None = None
    started: dict[str, float] = field(default_factory=dict)
    endings: dict[str, Body] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether the kubelet can act."""
        return self.power and self.kubelet


class Cluster:
    """All machines.

    Attributes:
        trainings: by uid of the job.
        own_faults: workers that failed by their own fault: the job's uid by their own.
        lost: when each worker ended that neither finished nor failed by itself, by uid.
    """

    def __init__(self, server: ApiServer, rng: random.Random, now_s: Callable[[], float]) -> None:
        self.server = server
        self.machines: dict[str, Machine] = {}
        self.trainings: dict[str, JobTraining] = {}
        self.own_faults: dict[str, str] = {}
        self.lost: dict[str, float] = {}
        self._rng = rng
        self._now_s = now_s
        self._ticks = 0

    # --- nodes -------------------------------------------------------------------------------------------------------

    def add(self, name: str, pool: str, *, cores: int = 2, skew_s: float = 0.0) -> None:
        """Add a node."""
        self.machines[name] = Machine(name, pool, cores, skew_s)
        allocatable = {"cpu": str(cores), "memory": "8Gi", "pods": "20"}
        ready = {"type": "Ready", "status": "True"}
        self.server.put(
            "nodes",
            {
                "metadata": {"name": name, "labels": {"pool": pool}},
                "spec": {"taints": []},
                "status": {"allocatable": allocatable, "conditions": [ready]},
            },
        )

    def remove(self, name: str) -> None:
        """Remove a node and its machine, as a cloud does."""
        self.machines.pop(name, None)
        self.server.drop(("nodes", "", name))

    def set_taints(self, name: str, *taints: str) -> None:
        """Give a node these taints, written ``key:effect``, in place of all others."""
        node = self.server.find("nodes", "", name)
        if node is not None:
            node["spec"]["taints"] = [dict(zip(("key", "effect"), taint.split(":"), strict=True)) for taint in taints]
            self.server.put("nodes", node)

    def set_readiness(self, name: str, ready: str) -> None:
        """Set a node's condition Ready."""
        node = self.server.find("nodes", "", name)
        if node is not None:
            node["status"]["conditions"] = [{"type": "Ready", "status": ready}]
            self.server.put("nodes", node)

    def pods_on(self, name: str) -> list[Body]:
        """Return the pods on a node."""
        return [pod for pod in self.server.of("pods") if pod["spec"].get("nodeName") == name]

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let one second pass."""
        self._ticks += 1
        self._schedule()
        for machine in list(self.machines.values()):
            self._watch_node(machine)
            if machine.works:
                for pod in self.pods_on(machine.name):
                    self._run(machine, pod)
        for training in self.trainings.values():
            self._train(training)
        if self._ticks % POD_GC_S == 0:
            self.server.collect_garbage()
            for pod in self.server.of("pods"):
                if (node := pod["spec"].get("nodeName")) and node not in self.machines:
                    self.server.drop(("pods", pod["metadata"]["namespace"], pod["metadata"]["name"]))

    def _schedule(self) -> None:
        for pod in self.server.of("pods"):
            if pod["spec"].get("nodeName") or pod["status"]["phase"] != "Pending":
                continue
            body = self.server.find("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
            assert body is not None
            chosen = next((node for node in self.server.of("nodes") if self._fits(body, node)), None)
            if chosen is not None:
                body["spec"]["nodeName"] = chosen["metadata"]["name"]
                body["status"].pop("conditions", None)
            elif not body["status"].get("conditions"):
                refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
                body["status"]["conditions"] = [{**refused, "lastTransitionTime": rfc3339(self._now_s())}]
            self.server.put("pods", body)

    def _fits(self, pod: Body, node: Body) -> bool:
        wanted: Mapping[str, str] = pod["spec"].get("nodeSelector") or {}
        if node["spec"].get("taints") or node["spec"].get("unschedulable"):
            return False
        if (
            node["status"]["conditions"][0]["status"] != "True"
            or not wanted.items() <= node["metadata"]["labels"].items()
        ):
            return False
        free = quantities(node["status"]["allocatable"])["cpu"]
        for other in self.pods_on(node["metadata"]["name"]):
            if other["status"]["phase"] not in ("Succeeded", "Failed"):
                free -= _cores(other)
        return free >= _cores(pod)

    def _watch_node(self, machine: Machine) -> None:
        """Declare a silent node unreachable, and remove its pods when their toleration is over."""
        now_s = self._now_s()
        if machine.works:
            if machine.silent_since_s is not None and now_s - machine.silent_since_s >= SILENT_S:
                self.set_taints(machine.name)
                self.set_readiness(machine.name, "True")
            machine.silent_since_s = None
            return
        if machine.silent_since_s is None:
            machine.silent_since_s = now_s
        silent_s = now_s - machine.silent_since_s
        if silent_s >= SILENT_S:
            self.set_readiness(machine.name, "Unknown")
            self.set_taints(
                machine.name, "node.kubernetes.io/unreachable:NoSchedule", "node.kubernetes.io/unreachable:NoExecute"
            )
            for pod in self.pods_on(machine.name):
                if silent_s >= SILENT_S + _toleration_s(pod) and "deletionTimestamp" not in pod["metadata"]:
                    self.evict(pod, "DeletionByTaintManager")

    # --- kubelet -----------------------------------------------------------------------------------------------------

    def evict(self, pod: Body, reason: str) -> None:
        """Delete a pod with the condition that names the reason."""
        metadata = pod["metadata"]
        body = self.server.find("pods", metadata["namespace"], metadata["name"])
        if body is None or body["status"]["phase"] in ("Succeeded", "Failed"):
            return
        target = {"type": "DisruptionTarget", "status": "True", "reason": reason}
        body["status"]["conditions"] = [*body["status"].get("conditions", []), target]
        self.server.put("pods", body)
        self.server.delete(("pods", metadata["namespace"], metadata["name"]))

    def reboot(self, machine: Machine) -> None:
        """Let all containers of a machine end without a word."""
        for pod in self.pods_on(machine.name):
            uid = pod["metadata"]["uid"]
            if machine.started.pop(uid, None) is not None:
                machine.endings[uid] = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": ""}
                self._stop(uid, lost=True)

    def end(self, pod: Body, *, exit_code: int, outcome: Outcome | None, reason: str = "") -> None:
        """End a pod's container; its kubelet reports this when it can."""
        uid = pod["metadata"]["uid"]
        machine = self.machines.get(pod["spec"].get("nodeName", ""))
        if machine is None or uid not in machine.started:
            return
        del machine.started[uid]
        message = encode_outcome(outcome) if outcome is not None else ""
        machine.endings[uid] = {"exitCode": exit_code, "reason": reason or "Completed", "message": message}
        self._stop(uid, lost=outcome is None or outcome.ending is Ending.LEFT)

    def _stop(self, uid: str, *, lost: bool) -> None:
        """Remove a training process."""
        for training in self.trainings.values():
            if training.processes.pop(uid, None) is not None and lost:
                self.lost[uid] = self._now_s()

    def _run(self, machine: Machine, pod: Body) -> None:
        """Do the kubelet's work for one pod."""
        metadata, uid, now_s = pod["metadata"], pod["metadata"]["uid"], self._now_s()
        key = ("pods", metadata["namespace"], metadata["name"])
        if (ending := machine.endings.pop(uid, None)) is not None:
            self._report_end(machine, key, ending)
            return
        if pod["status"]["phase"] in ("Succeeded", "Failed"):
            if "deletionTimestamp" in metadata:
                self.server.drop(key)
            return
        if "deletionTimestamp" in metadata:
            self._terminate(machine, pod, key)
        elif uid not in machine.started and pod["status"]["phase"] == "Running":
            # A kubelet of another machine of this name, or after a reboot: the container is not there.
            self._report_end(machine, key, {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": ""})
        elif uid not in machine.started:
            machine.started[uid] = now_s + self._rng.uniform(2.0, 6.0)
        elif now_s >= machine.started[uid] and pod["status"]["phase"] == "Pending":
            self._become_ready(machine, pod, key)

    def _become_ready(self, machine: Machine, pod: Body, key: tuple[str, str, str]) -> None:
        body = self.server.find(*key)
        assert body is not None
        since = rfc3339(self._now_s() + machine.skew_s)
        kept = [each for each in body["status"].get("conditions", []) if each["type"] == "DisruptionTarget"]
        body["status"] = {
            "phase": "Running",
            "podIP": f"10.0.{len(machine.name)}.{self._rng.randrange(2, 250)}",
            "conditions": [*kept, {"type": "Ready", "status": "True", "lastTransitionTime": since}],
            "containerStatuses": [
                {"name": "main", "state": {"running": {"startedAt": since}}, "imageID": _image_of(pod)}
            ],
        }
        self.server.put("pods", body)
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        if (training := self.trainings.get(owner)) is not None:
            uid = pod["metadata"]["uid"]
            training.processes[uid] = Process(name=pod["metadata"]["name"], uid=uid)

    def _terminate(self, machine: Machine, pod: Body, key: tuple[str, str, str]) -> None:
        """Ask the training process to leave, and confirm the deletion when it has."""
        uid = pod["metadata"]["uid"]
        process = self._process(uid)
        if process is None:
            machine.started.pop(uid, None)
            self.server.drop(key)
        elif process.leaves_at_s is None:
            process.leaves_at_s, process.told = self._now_s() + self._rng.uniform(1.0, 5.0), True

    def _process(self, uid: str) -> Process | None:
        return next((t.processes[uid] for t in self.trainings.values() if uid in t.processes), None)

    def _report_end(self, machine: Machine, key: tuple[str, str, str], ending: Body) -> None:
        body = self.server.find(*key)
        assert body is not None
        finished = rfc3339(self._now_s() + machine.skew_s)
        body["status"]["phase"] = "Failed" if ending["exitCode"] else "Succeeded"
        body["status"]["containerStatuses"] = [
            {"name": "main", "state": {"terminated": {**ending, "finishedAt": finished}}}
        ]
        body["status"]["conditions"] = [c for c in body["status"].get("conditions", []) if c["type"] != "Ready"]
        self.server.put("pods", body)

    # --- training ----------------------------------------------------------------------------------------------------

    def _train(self, training: JobTraining) -> None:
        now_s = self._now_s()
        training.deliver(now_s)
        silent = frozenset(
            pod["metadata"]["uid"]
            for machine in self.machines.values()
            if not machine.power
            for pod in self.pods_on(machine.name)
        )
        training.step(now_s, cut_off=silent)
        for process in list(training.processes.values()):
            pod = self.server.objects.get(("pods", training.namespace, process.name))
            if pod is None or pod["metadata"]["uid"] != process.uid:
                self._stop(process.uid, lost=True)  # removed by force
                continue
            member = process.uid in training.formation[1]
            if training.finished and member and process.uid not in silent:
                self.end(pod, exit_code=0, outcome=_outcome(Ending.FINISHED, training))
            elif process.leaves_at_s is not None and now_s >= process.leaves_at_s:
                self.end(pod, exit_code=0, outcome=_outcome(Ending.LEFT, training, told=process.told))

    def fail(self, pod: Body) -> None:
        """Let a training script fail by its own fault."""
        training = self.trainings[pod["metadata"]["ownerReferences"][0]["uid"]]
        if pod["metadata"]["uid"] in training.processes:
            self.own_faults[pod["metadata"]["uid"]] = training.job_uid
            self.end(pod, exit_code=1, outcome=_outcome(Ending.FAILED, training), reason="Error")


def _outcome(ending: Ending, training: JobTraining, **fields: Any) -> Outcome:
    return Outcome(ending=ending, reason=f"the process {ending.value}", epoch=0, step=training.steps, **fields)


def _image_of(pod: Body) -> str:
    """Return the image of a pod as its kubelet reports it."""
    image = pod["spec"]["containers"][0]["image"]
    return f"registry/image@sha256:{hashlib.sha256(image.encode()).hexdigest()}"


def _cores(pod: Body) -> float:
    view = parse_pod(pod)
    return view.requests.get("cpu", 0.0) if view is not None else 0.0


def _toleration_s(pod: Body) -> float:
    for each in pod["spec"].get("tolerations") or ():
        if each.get("key") == "node.kubernetes.io/unreachable":
            return float(each.get("tolerationSeconds", 300))
    return 300.0


def workers_of(server: ApiServer, job: str) -> list[Body]:
    """Return a job's pods."""
    return [pod for pod in server.of("pods") if pod["metadata"]["labels"].get(keys.LABEL_JOB) == job]
