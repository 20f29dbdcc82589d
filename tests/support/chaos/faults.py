"""The faults of a history: each is drawn with everything that it needs, so that it can be printed and repeated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heterotrain_core.contract import keys

from support.chaos.machines import Machine, workers_of

if TYPE_CHECKING:
    from support.chaos.history import Scenario


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at_s: when it begins.
        kind: its name.
        lasts_s: when it ends, after its begin; 0 for a fault without an end.
        choice: a number from which it takes its details.
    """

    at_s: float
    kind: str
    lasts_s: float
    choice: int

    def __str__(self) -> str:
        end = f" for {self.lasts_s:.0f} s" if self.lasts_s else ""
        return f"{self.at_s:5.0f} s  {self.kind}{end}  ({self.choice})"


Effect = Callable[["Scenario", Fault], Callable[[], None] | None]
"""Begins a fault and returns what ends it."""


def draw(rng: random.Random, *, until_s: float, most: int) -> list[Fault]:
    """Return the faults of a history, in order of time."""
    names = sorted(EFFECTS)
    found = []
    for _ in range(rng.randint(1, most)):
        kind = rng.choice(names)
        lasts_s = round(rng.choice([rng.uniform(2.0, 20.0), rng.uniform(20.0, 120.0)]), 1) if kind in LASTING else 0.0
        found.append(Fault(round(rng.uniform(5.0, until_s), 1), kind, lasts_s, rng.randrange(1_000_000)))
    return sorted(found, key=lambda fault: fault.at_s)


# --- network and operator --------------------------------------------------------------------------------------------


def _set_network(network: Any, name: str, value: Any, normal: Any) -> Callable[[], None]:
    setattr(network, name, value)
    return lambda: setattr(network, name, normal)


def api_away(scenario: Scenario, fault: Fault) -> Callable[[], None]:
    return _set_network(scenario.network, "away", ("refused", "dns", "silent")[fault.choice % 3], "")


def api_slow(scenario: Scenario, _: Fault) -> Callable[[], None]:
    return _set_network(scenario.network, "delay_s", 5.0, 0.0)


def api_failing(scenario: Scenario, fault: Fault) -> Callable[[], None]:
    return _set_network(scenario.network, "failing", (0.1, 0.5, 0.9)[fault.choice % 3], 0.0)


def api_answers_lost(scenario: Scenario, fault: Fault) -> Callable[[], None]:
    return _set_network(scenario.network, "lossy", (0.1, 0.5)[fault.choice % 2], 0.0)


def leader_cut_off(scenario: Scenario, fault: Fault) -> Callable[[], None]:
    leader = next((each for each in scenario.replicas if each.leads), scenario.replicas[0])
    return _set_network(leader.network, "away", ("refused", "dns", "silent")[fault.choice % 3], "")


def watches_deaf(scenario: Scenario, fault: Fault) -> Callable[[], None]:
    kinds = [keys.PLURAL, "pods", "configmaps", "nodes"]
    chosen = {kind for number, kind in enumerate(kinds) if fault.choice >> number & 1} or set(kinds)
    scenario.network.deaf |= chosen
    return scenario.network.deaf.clear


def watches_gone(scenario: Scenario, _: Fault) -> None:
    """Every watch is behind a history that the server has forgotten."""
    scenario.network.deaf |= {keys.PLURAL, "pods", "configmaps", "nodes"}
    scenario.later(20.0, scenario.server.compact)
    scenario.later(20.0, scenario.network.deaf.clear)


def operator_killed(scenario: Scenario, fault: Fault) -> None:
    """Kill the leader, or both."""
    for replica in scenario.replicas:
        if replica.leads or fault.choice % 3 == 0:
            replica.kill()


def operator_killed_at_write(scenario: Scenario, fault: Fault) -> None:
    """Kill the leader around one of its next writes; the Lease counts, too."""
    for replica in scenario.replicas:
        if replica.leads:
            replica.link.crash_at, replica.link.crash_after = fault.choice % 12, fault.choice % 2 == 0


# --- Prometheus ------------------------------------------------------------------------------------------------------


def prometheus_away(scenario: Scenario, _: Fault) -> Callable[[], None]:
    return _set_network(scenario.prometheus, "away", True, False)


def prometheus_lies(scenario: Scenario, fault: Fault) -> Callable[[], None]:
    lies = ("wild", "foreign", "old", "future", "mixed", "garbage")
    return _set_network(scenario.prometheus, "lie", lies[fault.choice % len(lies)], "")


# --- other writers ---------------------------------------------------------------------------------------------------


def others_write(scenario: Scenario, fault: Fault) -> None:
    """Another program or person changes the operator's objects, or the job's labels."""
    server, job = scenario.server, scenario.job_name
    target = [
        ("configmaps", keys.plan_name(job), {"data": {keys.PLAN_KEY: "{}"}}),
        ("configmaps", keys.plan_name(job), {"metadata": {"labels": None}}),
        ("poddisruptionbudgets", keys.disruption_budget_name(job), {"spec": {"minAvailable": 9}}),
        (keys.PLURAL, job, {"metadata": {"labels": {"team": str(fault.choice)}}}),
        (keys.PLURAL, job, {"status": {"conditions": []}}),
        ("pods", keys.worker_name(job, fault.choice % 4), {"metadata": {"annotations": {keys.ANNOTATION_PLAN: "9.9"}}}),
    ][fault.choice % 6]
    body = server.find(target[0], "ns", target[1])
    if body is not None:
        server._merge("another", (target[0], "ns", target[1]), target[2])


def plan_deleted(scenario: Scenario, _: Fault) -> None:
    scenario.server.drop(("configmaps", "ns", keys.plan_name(scenario.job_name)), who="another")


def objects_deleted(scenario: Scenario, _: Fault) -> None:
    scenario.server.drop(("poddisruptionbudgets", "ns", keys.disruption_budget_name(scenario.job_name)), who="another")


def job_suspended(scenario: Scenario, _: Fault) -> Callable[[], None]:
    def suspend(value: bool) -> None:
        body = scenario.server.find(keys.PLURAL, "ns", scenario.job_name)
        if body is not None:
            body["spec"]["suspend"] = value
            scenario.server.put(keys.PLURAL, body, who="user")

    suspend(True)
    return lambda: suspend(False)


def job_recreated(scenario: Scenario, _: Fault) -> None:
    """The user deletes the job and at once creates another one of the same name."""
    scenario.server.drop((keys.PLURAL, "ns", scenario.job_name), who="user")
    scenario.create_job()


# --- nodes and workers -----------------------------------------------------------------------------------------------


def _machine(scenario: Scenario, fault: Fault) -> Machine | None:
    names = sorted(name for name, machine in scenario.cluster.machines.items() if machine.works)
    return scenario.cluster.machines[names[fault.choice % len(names)]] if names else None


def node_dies(scenario: Scenario, fault: Fault) -> None:
    """A machine loses power; the cloud removes its node minutes later and brings a new one."""
    if (machine := _machine(scenario, fault)) is not None:
        machine.power = False
        scenario.cluster.reboot(machine)
        scenario.later(90.0, lambda: scenario.replace(machine, f"{machine.name}x"))


def node_name_reused(scenario: Scenario, fault: Fault) -> None:
    """A node is gone, and seconds later another one has its name."""
    if (machine := _machine(scenario, fault)) is not None:
        scenario.cluster.reboot(machine)
        scenario.cluster.remove(machine.name)
        pause_s = (0.0, 3.0, 30.0)[fault.choice % 3]
        scenario.later(pause_s, lambda: scenario.replace(machine, machine.name))


def node_reboots(scenario: Scenario, fault: Fault) -> Callable[[], None] | None:
    if (machine := _machine(scenario, fault)) is None:
        return None
    machine.power = False
    scenario.cluster.reboot(machine)
    return lambda: setattr(machine, "power", True)


def kubelet_away(scenario: Scenario, fault: Fault) -> Callable[[], None] | None:
    """A kubelet restarts or loses its network; the containers go on."""
    if (machine := _machine(scenario, fault)) is None:
        return None
    machine.kubelet = False
    return lambda: setattr(machine, "kubelet", True)


def spot_node_taken(scenario: Scenario, fault: Fault) -> None:
    """A notice, then the end of the node; another one comes later."""
    if (machine := _machine(scenario, fault)) is not None:
        scenario.cluster.set_taints(machine.name, "aws-node-termination-handler/spot-itn:NoSchedule")
        scenario.later(30.0, lambda: scenario.replace(machine, f"{machine.name}s"))


def node_drained(scenario: Scenario, fault: Fault) -> None:
    if (machine := _machine(scenario, fault)) is not None:
        for pod in scenario.cluster.pods_on(machine.name):
            scenario.cluster.evict(pod, "EvictionByEvictionAPI")


def _training_pod(scenario: Scenario, fault: Fault) -> Any:
    running = [
        pod
        for pod in workers_of(scenario.server, scenario.job_name)
        if any(pod["metadata"]["uid"] in each.processes for each in scenario.cluster.trainings.values())
    ]
    return running[fault.choice % len(running)] if running else None


def worker_killed(scenario: Scenario, fault: Fault) -> None:
    if (pod := _training_pod(scenario, fault)) is not None:
        scenario.cluster.end(pod, exit_code=137, outcome=None, reason="Error")


def worker_fails(scenario: Scenario, fault: Fault) -> None:
    """The only fault that is the job's own."""
    if (pod := _training_pod(scenario, fault)) is not None:
        scenario.cluster.fail(pod)


def pod_deleted(scenario: Scenario, fault: Fault) -> None:
    if (pod := _training_pod(scenario, fault)) is not None:
        scenario.server.delete(("pods", "ns", pod["metadata"]["name"]), who="another")


def pod_deleted_by_force(scenario: Scenario, fault: Fault) -> None:
    if (pod := _training_pod(scenario, fault)) is not None:
        scenario.server.drop(("pods", "ns", pod["metadata"]["name"]), who="another")


EFFECTS: dict[str, Effect] = {
    "API server away": api_away,
    "API server 5 s slow": api_slow,
    "API server failing": api_failing,
    "answers lost": api_answers_lost,
    "leader cut off": leader_cut_off,
    "watches silently dead": watches_deaf,
    "410 Gone": watches_gone,
    "operator killed": operator_killed,
    "operator killed at a write": operator_killed_at_write,
    "Prometheus away": prometheus_away,
    "Prometheus lies": prometheus_lies,
    "another writer": others_write,
    "plan deleted": plan_deleted,
    "objects deleted": objects_deleted,
    "job suspended": job_suspended,
    "job recreated": job_recreated,
    "node dies": node_dies,
    "node name reused": node_name_reused,
    "node reboots": node_reboots,
    "kubelet away": kubelet_away,
    "spot node taken": spot_node_taken,
    "node drained": node_drained,
    "worker killed": worker_killed,
    "worker fails": worker_fails,
    "pod deleted": pod_deleted,
    "pod deleted by force": pod_deleted_by_force,
}
LASTING = frozenset(
    {
        *("API server away", "API server 5 s slow", "API server failing", "answers lost", "leader cut off"),
        *("watches silently dead", "Prometheus away", "Prometheus lies", "job suspended", "node reboots"),
        "kubelet away",
    }
)
"""Faults that end."""
