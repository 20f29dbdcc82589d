"""Limits and types that the parts of a ``HeteroTrainJob`` share."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field, WithJsonSchema

MAX_POOLS = 32
MAX_WORKERS = 1000
MAX_NUM_PROC_PER_WORKER = 16
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

TimestampText = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]
"""The same, not parsed: the operator wrote it itself."""

LabelValue = Annotated[str, Field(max_length=63)]
EnvName = Annotated[str, Field(min_length=1, max_length=256)]
