"""Accelerators that a worker asks for: how many, and those that the trainer cannot use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.cluster_state.containers import training_container
from heterotrain_operator.cluster_state.quantity import parse_quantity

_GPU = re.compile(r"/(gpu|gpu\.shared|mig-[^/]+)$")
_SLICE = re.compile(r"/mig-[^/]+$")
_UNUSABLE = (
    (re.compile(r"^(cloud-tpus\.)?google\.com/(tpu|v\d|preemptible-v\d)"), "TPUs"),
    (re.compile(r"^aws\.amazon\.com/neuron"), "Trainium and Inferentia"),
    (re.compile(r"^habana\.ai/"), "Gaudi"),
    (re.compile(r"^gpu\.intel\.com/"), "GPUs of Intel"),
    (re.compile(r"^huawei\.com/Ascend"), "Ascend"),
)
"""Resources of devices that the trainer would leave idle, while it trains on the CPU."""


def accelerators(pool: WorkerPool, template: Mapping[str, Any]) -> int:
    """Return how many accelerators a worker requests.

    An accelerator is an extended resource with a domain of its own, such as ``nvidia.com/gpu``. If resources named as
    GPUs exist, other extended resources (network cards such as ``vpc.amazonaws.com/efa``, shares of a GPU's memory) do
    not count.
    """
    found = _extended(pool, template)
    gpus = [count for name, count in found.items() if _GPU.search(name)]
    return sum(gpus) or sum(found.values())


def unusable_problem(pool: WorkerPool, template: Mapping[str, Any]) -> str:
    """Return in one sentence which requested devices the trainer cannot use; empty when it can use all."""
    for name, count in _extended(pool, template).items():
        kind = next((kind for pattern, kind in _UNUSABLE if count and pattern.search(name)), "")
        if kind:
            return (
                f"a worker of pool {pool.name} requests {name}, but the library trains on GPUs of NVIDIA and AMD, and "
                f"on CPUs, not on {kind}: remove {name} from the limits, or use runtime: Torchrun with an own script"
            )
    return ""


def slices_problem(pool: WorkerPool, template: Mapping[str, Any]) -> str:
    """Return in one sentence that a worker has several parts of a divided GPU (MIG); empty for at most one."""
    count = sum(count for name, count in _extended(pool, template).items() if _SLICE.search(name))
    if count <= 1:
        return ""
    return (
        f"a worker of pool {pool.name} requests {count} MIG slices, but CUDA shows each process only one: request one "
        "slice for each worker, and raise maxReplicas"
    )


def _extended(pool: WorkerPool, template: Mapping[str, Any]) -> dict[str, int]:
    """Return the extended resources that the training container of a worker requests."""
    own = (training_container(template).get("resources") or {}).get("limits") or {}
    return {
        name: int(parse_quantity(value))
        for name, value in {**own, **pool.resources.limits}.items()
        if "/" in name and not name.partition("/")[0].endswith("kubernetes.io")
    }
