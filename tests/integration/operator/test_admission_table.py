"""The table of jobs that the forecast is checked with, against a real API server: both refuse the same jobs."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.errors import Rejected
from heterotrain_operator.kube.resources import JOBS
from support.job_table import ACCEPTED, REFUSED, job


async def submit(kube: KubeClient, body: dict[str, Any]) -> None:
    """Create the job by a dry run with strict validation of fields, as ``kubectl apply`` does; nothing is stored."""
    body["metadata"]["namespace"] = "default"
    await kube.create(JOBS, body, dry_run=True)


@pytest.mark.parametrize("case", ACCEPTED)
async def test_the_api_server_accepts_what_the_forecast_accepts(kube: KubeClient, case: str) -> None:
    await submit(kube, job(ACCEPTED[case]))


@pytest.mark.parametrize("case", REFUSED)
async def test_the_api_server_refuses_what_the_forecast_refuses(kube: KubeClient, case: str) -> None:
    change, _ = REFUSED[case]
    with pytest.raises(Rejected):
        await submit(kube, job(change))
