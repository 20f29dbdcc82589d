"""An autoscaled pool asks for nodes in slow start: 1, 2 and 4 workers wait, as long as nodes come for them."""

from __future__ import annotations

import time

from heterotrain_operator.cluster_state.parse import seconds
from heterotrain_operator.decide.workers.replicas import UNSCHEDULABLE_S
from heterotrain_operator.kube.verbs import Body
from support.api_cluster import Cluster, Operator
from support.waiting import until


def unschedulable(pod: Body) -> bool:
    """Return whether the scheduler has found no node for a pod, as autoscalers see it."""
    conditions = pod["status"].get("conditions", ())
    return not pod["spec"].get("nodeName") and any(each.get("reason") == "Unschedulable" for each in conditions)


async def test_waiting_workers_double_with_each_round_of_nodes(cluster: Cluster, operator: Operator) -> None:
    await cluster.create(cluster.job(cluster.pool("a", maxReplicas=20), elasticPolicy={"minReplicas": 1}))
    nodes, asked = 0, []

    async def waiting(count: int) -> list[Body] | None:
        """Return the waiting workers once all of them have waited longer than a scheduler takes."""
        pods = [pod for pod in (await cluster.pods()).values() if not pod["spec"].get("nodeName")]
        late = [pod for pod in pods if time.time() - seconds(pod["metadata"]["creationTimestamp"]) > UNSCHEDULABLE_S]
        return pods if len(late) == len(pods) >= count and all(map(unschedulable, pods)) else None

    for wanted in (1, 2, 4):
        pods = await until(lambda wanted=wanted: waiting(wanted), f"{wanted} workers wait")
        asked.append(len(pods))
        for _ in pods:  # the autoscaler brings a node for each worker that waits
            nodes += 1
            await cluster.add_node("a", cpu="1", suffix=f"-{nodes}")
        await cluster.scheduled(nodes)
    assert asked == [1, 2, 4]
