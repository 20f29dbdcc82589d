"""Limits and types that the parts of a ``HeteroTrainJob`` share."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field, WithJsonSchema

MAX_POOLS = 32
MAX_WORKERS = 1000
MAX_NUM_PROC_PER_WORKER = 16
MAX_RANKS = 5000
"""A plan of more ranks never fits into a ConfigMap; with long names, fewer do."""
MAX_BATCH = 10_000_000
MAX_NAME_LENGTH = 48
"""Room for ``-w999`` and ``-on-demand`` below the 63 characters of a label or host name."""

# Kubernetes accepts numbers of any length, but changes those beyond 64 bits.
_QUANTITY = r"^([0-9]{1,18}(\.[0-9]{0,9})?|\.[0-9]{1,9})([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?$"


def _quantity(value: int | str) -> int | str:
    if not re.fullmatch(_QUANTITY, str(value)):
        raise ValueError(
            f"{value!r} is not a quantity: write a number of at least 0, with a suffix such as m, Mi or Gi"
        )
    return value


Quantity = Annotated[
    int | str,
    AfterValidator(_quantity),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "pattern": _QUANTITY,
        }
    ),
]
"""A Kubernetes quantity that is not negative."""

Timestamp = Annotated[AwareDatetime, WithJsonSchema({"type": "string", "format": "date-time"})]
"""A time in RFC 3339."""


def _time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return text


TimestampText = Annotated[str, AfterValidator(_time), WithJsonSchema({"type": "string", "format": "date-time"})]
"""The same as text: the operator wrote it itself."""

MAX_COUNT = 2**53 - 1
"""Most that a count of the status holds: larger whole numbers are not exact in every reader of JSON."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A whole number of the status."""
Number = Annotated[float, Field(allow_inf_nan=False)]
"""A number of the status."""


def count(value: float) -> int:
    """Return a number as a ``Count``, clamped to its limits; 0 for NaN."""
    return int(max(0, min(value, MAX_COUNT)))


LabelValue = Annotated[str, Field(max_length=63)]
EnvName = Annotated[str, Field(min_length=1, max_length=256)]
