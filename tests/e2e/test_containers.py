"""Containers beside the training one, and limits of a worker's own, on real kubelets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Start


def one_worker(spec: dict[str, Any]) -> None:
    """Give a job one pool with one worker."""
    spec["workerPools"] = spec["workerPools"][:1]
    spec["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 1}


@pytest.mark.thorough
def test_a_worker_over_its_own_limits_has_failed(start: Start) -> None:
    """It was replaced without end: ten times in three minutes."""

    def with_limit(manifest: dict[str, Any]) -> None:
        one_worker(manifest["spec"])
        manifest["spec"]["backoffLimit"] = 1
        container = manifest["spec"]["template"]["spec"]["containers"][0]
        command = [*container.pop("command"), *container.pop("args", [])]
        script = 'head -c 60M /dev/zero > /tmp/much; exec "$@"'
        container["command"] = ["sh", "-c", script, "sh", *command]
        (pool,) = manifest["spec"]["workerPools"]
        pool["resources"]["limits"]["ephemeral-storage"] = pool["resources"]["requests"]["ephemeral-storage"] = "20Mi"

    running = start(epochs=None, edit=with_limit)
    running.job.wait_true("Failed", timeout_s=300)
    status = running.job.status()
    assert (status["restarts"], status["disruptions"]) == (2, 0)
    assert "ephemeral local storage usage exceeds" in status["lastFailure"]
    assert "raise limits.ephemeral-storage" in status["lastFailure"]
