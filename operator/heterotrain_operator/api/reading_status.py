"""The status of a job's object as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.tolerant import read_tolerantly


def read_status(body: Mapping[str, Any]) -> HeteroTrainJobStatus:
    """Return the job's status; values of another version that this one cannot read are left out."""
    return read_tolerantly(HeteroTrainJobStatus, body.get("status") or {})
