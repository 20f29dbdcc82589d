"""How many workers fit: quantities, requests, taints, and what is left of the nodes."""

from __future__ import annotations

import pytest
from heterotrain_operator.cluster_state.parse import parse_node
from heterotrain_operator.cluster_state.quantity import MOST, parse_quantity, pod_requests
from heterotrain_operator.cluster_state.views import Taint
from heterotrain_operator.decide.workers.capacity import Shape, free_slots, tolerates
from support.fake_cluster import FakeCluster, node_body, pool


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("500m", 0.5),
        ("1.5", 1.5),
        ("1Ki", 1024),
        ("1.5Gi", 1.5 * 2**30),
        ("2k", 2000),
        ("1e3", 1000),
        ("3E2", 300),
        (4, 4),
        (".5", 0.5),
    ],
)
def test_quantities(text: str, number: float) -> None:
    assert parse_quantity(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["1e400", "9e99Ei", "16Ei"])
def test_excessive_quantities_count_as_the_maximum(text: str) -> None:
    """Infinity does not work: it is not a whole number, and its difference from itself is undefined."""
    assert parse_quantity(text) == MOST
    assert parse_quantity(f"-{text}") == -MOST
    assert pod_requests({"containers": [container(requests={"cpu": text})]}) == {"cpu": MOST, "pods": 1.0}


@pytest.mark.parametrize("text", ["", "many", "1Xi", "1K", "1 Gi", "--1", "1_000", "Infinity", "nan"])
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("resources", "cores", "memory"),
    [
        ({"requests": {"cpu": "8"}}, 8.1, 2.0**30),
        ({"limits": {"cpu": "8"}}, 2.1, 2.0**30),
        ({"limits": {"memory": "4Gi", "cpu": "8"}, "requests": {"cpu": "3"}}, 3.1, 2.0**30),
        ({"requests": {"nvidia.com/gpu": "8"}}, 2.1, 2.0**30),
        ({}, 2.1, 2.0**30),
        ("8 cores", 2.1, 2.0**30),
        ({"requests": "8 cores"}, 2.1, 2.0**30),
    ],
)
def test_resources_of_the_whole_pod_replace_the_sum_of_its_containers(
    resources: object, cores: float, memory: float
) -> None:
    spec = {
        "resources": resources,
        "containers": [container(requests={"cpu": "2", "memory": "1Gi"})],
        "overhead": {"cpu": "100m"},
    }
    found = pod_requests(spec)
    assert found == {"cpu": pytest.approx(cores), "memory": memory, "pods": 1.0}


def test_limits_of_the_whole_pod_count_where_no_container_requests_any() -> None:
    spec = {"resources": {"limits": {"memory": "4Gi", "hugepages-2Mi": "1Gi"}}, "containers": [container()]}
    assert pod_requests(spec) == {"memory": 2.0**32, "hugepages-2Mi": 2.0**30, "pods": 1.0}


def container(**resources: dict[str, str]) -> dict[str, object]:
    return {"name": "c", "resources": resources}


def test_a_limit_alone_is_a_request_and_a_request_wins() -> None:
    spec = {"containers": [container(limits={"cpu": "2"}), container(limits={"cpu": "4"}, requests={"cpu": "1"})]}
    assert pod_requests(spec) == {"cpu": 3.0, "pods": 1.0}


def test_a_large_init_container_counts_together_with_the_sidecars_before_it() -> None:
    spec = {
        "initContainers": [
            {**container(requests={"cpu": "1"}), "restartPolicy": "Always"},
            container(requests={"cpu": "5"}),
        ],
        "containers": [container(requests={"cpu": "2"})],
        "overhead": {"cpu": "100m"},
    }
    assert pod_requests(spec)["cpu"] == pytest.approx(6.1)


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        ({"key": "k", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "value": "other"}, False),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "k", "value": "v", "effect": "NoSchedule"}, True),
        ({"key": "other", "operator": "Exists"}, False),
        ({}, False),
    ],
)
def test_tolerations_by_kubernetes_rules(toleration: dict[str, str], covers: bool) -> None:
    assert tolerates(toleration, Taint(key="k", value="v", effect="NoSchedule")) is covers


def shape(cpu: float = 1.0, **selector: str) -> Shape:
    return Shape(requests={"cpu": cpu, "pods": 1.0}, node_selector=selector, tolerations=())


def test_free_slots_are_the_whole_workers_that_still_fit() -> None:
    nodes = [parse_node(node_body("a1", "a")), parse_node(node_body("a2", "a")), parse_node(node_body("b1", "b"))]
    found = free_slots(shape(1.5, pool="a"), nodes, {"a1": {"cpu": 2.0}})
    assert (found.slots, found.matching_nodes, found.possible) == (1 + 2, 2, True)


@pytest.mark.parametrize(
    "node",
    [
        node_body("n", "a", ready="False"),
        node_body("n", "a", ready="Unknown"),
        node_body("n", "a", unschedulable=True),
        node_body("n", "a", taints=["k:NoSchedule"]),
        node_body("n", "a", taints=["karpenter.sh/disrupted:NoSchedule"]),
    ],
)
def test_no_free_slots_on_nodes_that_take_no_workers(node: dict[str, object]) -> None:
    assert free_slots(shape(), [parse_node(node)], {}).slots == 0


def test_a_preference_is_not_an_obstacle() -> None:
    node = parse_node(node_body("n", "a", taints=["k:PreferNoSchedule"]))
    assert free_slots(shape(), [node], {}).slots == 4


def test_a_worker_larger_than_any_node_is_impossible_not_only_without_room() -> None:
    found = free_slots(shape(9.0), [parse_node(node_body("n", "a"))], {})
    assert (found.slots, found.possible) == (0, False)


def test_workers_are_created_for_the_free_slots_plus_one_that_waits() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=8)).with_nodes("a", cpu="3")
    cluster.settle()
    assert len(cluster.pods) == 3
    cluster.schedule().run()
    cluster.settle()
    assert len(cluster.pods) == 4, "one more waits for room, so that an autoscaler sees the demand"
    cluster.schedule()
    cluster.settle()
    assert len(cluster.pods) == 4
    assert len(cluster.members()) == 3


def test_foreign_pods_take_room() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=8)).with_nodes("a", cpu="4")
    cluster.foreign = {"a": {"cpu": 2.0, "pods": 1.0}}
    cluster.settle()
    assert len(cluster.pods) == 2


def test_surplus_waiting_workers_are_removed_but_not_at_once() -> None:
    """By a wrong estimate two fit: one goes on waiting, the other is removed after a while, and no new one comes."""
    cluster = FakeCluster(pool("a", maxReplicas=2)).with_nodes("a", cpu="2")
    cluster.settle()
    assert len(cluster.pods) == 2
    cluster.set_node("a", "False")
    cluster.schedule()
    cluster.settle()
    assert len(cluster.pods) == 2
    cluster.pass_time(11)
    cluster.settle()
    assert len(cluster.pods) == 1
    cluster.schedule()
    cluster.settle()
    assert len(cluster.pods) == 1


def test_a_waiting_worker_does_not_block_another_pool() -> None:
    """With at most two workers, the one that waits for pool a is removed when pool b gets room."""
    cluster = FakeCluster(pool("a"), pool("b", maxReplicas=2), spec={"elasticPolicy": {"maxReplicas": 2}}).with_nodes(
        "b", cpu="1"
    )
    cluster.start()
    cluster.schedule()
    cluster.pass_time(11)
    cluster.settle()
    assert len(cluster.members()) == 1
    cluster.with_nodes("b2", cpu="1").settle()
    cluster.schedule().run()
    cluster.settle()
    cluster.pass_time(11)
    cluster.settle()
    assert len(cluster.members()) == 2
    assert all(body["spec"]["nodeSelector"] == {"pool": "b"} for body in cluster.pods.values())


def test_the_minimum_is_created_even_if_it_does_not_fit() -> None:
    cluster = FakeCluster(pool("a", maxReplicas=4), spec={"elasticPolicy": {"minReplicas": 3}})
    cluster.settle()
    assert len(cluster.pods) == 3


def test_the_status_says_what_to_do_about_an_impossible_worker() -> None:
    impossible = pool("a", resources={"limits": {"cpu": "64"}})
    cluster = FakeCluster(impossible).with_nodes("a")
    cluster.settle()
    cluster.schedule()
    cluster.settle()
    assert "no node of pool a is large enough for a worker: lower resources.requests" in cluster.status["reason"]


def test_the_scheduler_s_answer_overrides_the_estimate() -> None:
    """There seems to be room for four, but for a hidden reason the scheduler places no worker."""
    cluster = FakeCluster(pool("a", maxReplicas=8, tolerations=[{"key": "k", "operator": "Exists"}]))
    cluster.with_nodes("a", taints=["k:NoSchedule"])
    cluster.settle()
    assert len(cluster.pods) == 4
    for _ in range(3):
        cluster.schedule()
        cluster.settle()
    assert len(cluster.pods) == 4
    cluster.pass_time(11)
    cluster.settle()
    assert len(cluster.pods) == 1
