"""Any events in any order: passes come to rest, versions only grow, and no worker is created twice."""

from __future__ import annotations

from collections.abc import Callable

from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.decide.job import decide
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, pool, without_times
from support.repeat import times

POOLS = ("a", "b", "c")
Event = Callable[[FakeCluster], object]


def on_pod(change: Callable[[FakeCluster, str], object]) -> Callable[[int], Event]:
    def make(number: int) -> Event:
        def occur(cluster: FakeCluster) -> None:
            running = sorted(name for name, body in cluster.pods.items() if body["status"]["phase"] == "Running")
            if running:
                change(cluster, running[number % len(running)])

        return occur

    return make


def on_node(change: Callable[[FakeCluster, str], object]) -> Callable[[int], Event]:
    def make(number: int) -> Event:
        def occur(cluster: FakeCluster) -> None:
            if cluster.nodes:
                change(cluster, sorted(cluster.nodes)[number % len(cluster.nodes)])

        return occur

    return make


def heal(cluster: FakeCluster, node: str) -> None:
    cluster.nodes[node]["spec"]["taints"].clear()
    cluster.set_node(node, "True")


EVENTS: tuple[Callable[[int], Event], ...] = (
    on_pod(lambda cluster, name: cluster.end(name, Ending.LEFT)),
    on_pod(lambda cluster, name: cluster.end(name, Ending.FAILED, exit_code=1, reason="boom")),
    on_pod(lambda cluster, name: cluster.end(name, exit_code=137)),
    on_pod(lambda cluster, name: cluster.vanish(name)),
    on_pod(lambda cluster, name: cluster.set_ready(name, ready=False)),
    on_node(lambda cluster, name: cluster.taint(name, "karpenter.sh/disrupted:NoSchedule")),
    on_node(lambda cluster, name: cluster.set_node(name, "Unknown")),
    on_node(lambda cluster, name: cluster.nodes.pop(name)),
    on_node(heal),
    lambda number: lambda cluster: cluster.with_nodes(f"{POOLS[number % 3]}{number}", cpu="2"),
    lambda _: lambda cluster: cluster.schedule(),
    lambda _: lambda cluster: cluster.schedule().run(),
    lambda number: lambda cluster: cluster.pass_time(number),
    lambda number: lambda cluster: cluster.edit(lambda spec: spec.update(suspend=number % 2 == 0)),
    lambda number: (
        lambda cluster: cluster.edit(
            lambda spec: spec.update(elasticPolicy={"minReplicas": 1, "maxReplicas": 1 + number % 6})
        )
    ),
    lambda _: lambda cluster: setattr(cluster, "plan", None),
)

events = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 30)), max_size=12)


def a_cluster() -> FakeCluster:
    pools = (pool("a", maxReplicas=3), pool("b", maxReplicas=2), pool("c", maxReplicas=2, capacityType="Spot"))
    return FakeCluster(*pools, spec={"elasticPolicy": {"minReplicas": 2}, "backoffLimit": 1000}).with_nodes(
        "a", "b", "c", cpu="2"
    )


@settings(max_examples=times(gate=20, every=1000))
@given(events)
def test_every_scenario_comes_to_rest_and_keeps_its_promises(
    scenario: list[tuple[Callable[[int], Event], int]],
) -> None:
    cluster = a_cluster()
    newest = (-1, -1)
    for event, number in scenario:
        event(number)(cluster)
        cluster.settle()  # asserts that passes come to rest, and that no name is created twice
        if cluster.plan is None:
            assert cluster.status["state"] == "Suspended", "only a job that was never active has no plan"
            continue
        version = cluster.version()
        mirrored = tuple(int(each) for each in cluster.status["plan"]["desired"].split("."))
        assert mirrored >= newest
        assert version[1] >= newest[1], "a revision never falls"
        newest = mirrored
        members = cluster.members()
        assert len(members) == len(set(members))
        shares = [member["share_samples"] for member in cluster.plan_json["members"]]
        assert not shares or sum(shares) == 100
        assert len(cluster.status["internal"]["accountedWorkers"]) <= len(cluster.pods) + len(members)


@settings(max_examples=times(gate=20, every=1000))
@given(events)
def test_the_decision_depends_on_its_inputs_only(scenario: list[tuple[Callable[[int], Event], int]]) -> None:
    cluster = a_cluster()
    for event, number in scenario:
        event(number)(cluster)
        assert decide(cluster.observe()) == decide(cluster.observe())
        cluster.step()


@settings(max_examples=times(gate=20, every=1000))
@given(events)
def test_a_quiet_cluster_heals_every_job(scenario: list[tuple[Callable[[int], Event], int]]) -> None:
    """When the disturbances stop and there is room, the job trains with all its workers again."""
    cluster = a_cluster()
    for event, number in scenario:
        event(number)(cluster)
        cluster.step()
    cluster.edit(lambda spec: spec.update(suspend=False, elasticPolicy={"minReplicas": 2}))
    for name in list(cluster.nodes):
        heal(cluster, name)
    cluster.with_nodes("a9", "b9", "c9", cpu="4")
    for _ in range(8):
        for name, body in list(cluster.pods.items()):
            if "deletionTimestamp" in body["metadata"]:
                cluster.vanish(name)
            elif body["status"]["phase"] == "Running":
                cluster.set_ready(name)
        cluster.pass_time(400)
        cluster.settle()
        cluster.schedule().run()
    cluster.settle()
    assert cluster.status["state"] == "Running"
    assert len(cluster.members()) == 7


@settings(max_examples=times(gate=20, every=1000))
@given(events)
def test_a_decision_taken_again_adds_nothing(scenario: list[tuple[Callable[[int], Event], int]]) -> None:
    cluster = a_cluster()
    for event, number in scenario:
        event(number)(cluster)
        cluster.step()
    cluster.settle()
    again = without_times(cluster.step())
    assert (again.create, again.remove, again.plan, again.touch, again.events) == ((), (), None, (), ())
