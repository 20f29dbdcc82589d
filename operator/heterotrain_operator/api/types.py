"""Limits and kinds of values that the parts of a ``HeteroTrainJob`` share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field, WithJsonSchema

MAX_POOLS = 32
MAX_WORKERS = 1000
MAX_RANKS_PER_WORKER = 16
MAX_BATCH = 10_000_000
MAX_NAME_LENGTH = 48
"""Room for ``-w999`` and ``-on-demand`` below the 63 characters of a label or host name."""

Quantity = Annotated[
    int | str,
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[mkMGTPE]|[eE][-+]?[0-9]+)?$",
        }
    ),
]
"""A Kubernetes quantity; a negative one is refused by the pattern."""

Moment = Annotated[AwareDatetime, WithJsonSchema({"type": "string", "format": "date-time"})]
"""A time in RFC 3339."""

LabelValue = Annotated[str, Field(max_length=63)]
EnvName = Annotated[str, Field(min_length=1, max_length=256)]
