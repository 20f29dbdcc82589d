"""The workload of a busy cluster: nodes of three kinds, and jobs that do not all fit with their most workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from heterotrain_core.contract import keys

Body = dict[str, Any]

GPUS_PER_NODE = 8
PARTS = {"a100": 1, "v100": 2, "t4-spot": 2}
"""Nodes of each kind, relative to each other."""
TEAMS = 10
_KINDS = (
    # The most workers of each pool, and the least workers in total, from small to large requests.
    ({"a100": 4, "v100": 6}, 4),
    ({"v100": 8, "t4-spot": 8}, 4),
    ({"t4-spot": 12}, 2),
    ({"a100": 4, "v100": 4, "t4-spot": 8}, 4),
    ({"v100": 10}, 3),
    ({"a100": 2, "t4-spot": 10}, 2),
    ({"a100": 8}, 1),
    ({"v100": 6, "t4-spot": 6}, 2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The workload's size: the nodes hold ``pods`` workers, and the ``jobs`` together request more."""

    jobs: int
    pods: int

    @property
    def nodes(self) -> dict[str, int]:
        """Nodes of each kind; their slots add up to ``pods`` or slightly more."""
        parts = sum(PARTS.values())
        return {kind: -(-self.pods * part // (parts * GPUS_PER_NODE)) for kind, part in PARTS.items()}

    @property
    def slots(self) -> int:
        """Number of workers that all nodes together hold."""
        return sum(self.nodes.values()) * GPUS_PER_NODE


def nodes(size: Size) -> list[Body]:
    """Return the nodes' manifests."""
    amounts = {"cpu": "96", "memory": "768Gi", "pods": "110", "nvidia.com/gpu": str(GPUS_PER_NODE)}
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": f"{kind}-{number}", "namespace": "", "labels": {"gpu": kind}},
            "status": {"allocatable": amounts, "capacity": amounts},
        }
        for kind, count in size.nodes.items()
        for number in range(count)
    ]


def teams() -> list[str]:
    """Return the jobs' namespaces."""
    return [f"team-{number}" for number in range(TEAMS)]


def job(number: int) -> Body:
    """Return the manifest of a job; eight kinds alternate."""
    pools, least = _KINDS[number % len(_KINDS)]
    return {
        "apiVersion": f"{keys.GROUP}/{keys.VERSION}",
        "kind": keys.KIND,
        "metadata": {"name": f"job-{number}", "namespace": teams()[number % TEAMS]},
        "spec": {
            "training": {"globalBatchSize": 512, "epochs": 20},
            "elasticPolicy": {"minReplicas": least},
            "workerPools": [
                {
                    "name": kind,
                    "maxReplicas": most,
                    "nodeSelector": {"gpu": kind},
                    "capacityType": "Spot" if kind.endswith("spot") else "OnDemand",
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                }
                for kind, most in pools.items()
            ],
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "image": "registry.example/training:1",
                            "command": ["heterotrain-run", "train.py"],
                            "resources": {"requests": {"cpu": "8", "memory": "64Gi"}},
                        }
                    ]
                }
            },
        },
    }
