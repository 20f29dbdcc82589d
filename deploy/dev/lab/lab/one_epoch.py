"""Times a job of one epoch, as language models train, with the default boundary and with even shares."""

from __future__ import annotations

import time

from heterotrain_core.contract import env

from lab.cluster import Cluster, ClusterError
from lab.jobs import Job, committed_steps, example, fresh_folder

BATCH = 448
STEPS = 120
SHARES = {"learned": {"boundary": "Auto"}, "even": {"boundary": "Never"}}
LIMIT_S = 900.0
LOOK_S = 0.2


def measure_one_epoch(cluster: Cluster, shares: str) -> tuple[float, float]:
    """Return the seconds from the first committed step to the middle one and to the last one, all three pools at work.

    Args:
        cluster: with a prepared namespace.
        shares: a key of ``SHARES``.

    Raises:
        ClusterError: the job takes too long.
    """
    name = f"one-epoch-{shares}"
    folder = fresh_folder(name)
    cluster.kubectl("delete", "configmap", "heterotrain-speeds", "--ignore-not-found")  # of an earlier measurement
    cluster.apply(
        example(
            name,
            training={"epochs": 1, "globalBatchSize": BATCH, "rebalance": SHARES[shares]},
            spec={"elasticPolicy": {"minReplicas": 3, "maxReplicas": 3}},
            arguments=["--samples-per-epoch", str(BATCH * STEPS)],
            environment={env.SAMPLE_LOG_DIR: "/checkpoints/samples"},
        )
    )
    at_s: dict[int, float] = {}
    limit_s = time.monotonic() + LIMIT_S
    while STEPS not in at_s:
        if time.monotonic() > limit_s:
            raise ClusterError(f"{name}: {max(at_s, default=0)} of {STEPS} steps after {LIMIT_S:g} s")
        at_s.setdefault(committed_steps(folder / "samples"), time.monotonic())
        time.sleep(LOOK_S)
    Job(cluster, name).wait_true("Succeeded", timeout_s=60)
    first_s = min(moment for steps, moment in at_s.items() if steps)
    middle_s = min(moment for steps, moment in at_s.items() if steps >= STEPS // 2)
    return middle_s - first_s, at_s[STEPS] - first_s
