"""Queries to Prometheus, through the API server or directly."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from heterotrain_operator.api.text import quoted

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.refusals import said
from heterotrain_cli.errors import InputError, UnavailableError

TIMEOUT_S: Final = 30
_SERVICE: Final = re.compile(r"[a-z0-9.-]+/[a-z0-9.-]+:[a-z0-9-]+")


class Span(NamedTuple):
    """Points of time: from begin to end, in seconds since 1970, and the seconds between two of them."""

    begin_s: float
    end_s: float
    step_s: float


class QueriedSeries(NamedTuple):
    """The labels of one series, and its points: seconds since 1970, and the value."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


def series_of(
    cluster: Cluster, where: str, query: str, labels: Sequence[str] = (), span: Span | None = None
) -> list[QueriedSeries]:
    """Return what Prometheus answers to a query.

    Args:
        cluster: through whose API server a service is reached.
        where: ``http://HOST:PORT``, or ``NAMESPACE/SERVICE:PORT`` of a service in the cluster.
        query: in PromQL.
        labels: that every series has to have.
        span: points of time; ``None`` for the present.

    Raises:
        InputError: the address has neither of its two forms.
        UnavailableError: there is no answer that can be read.
    """
    asked, path, key = {"query": query}, "/api/v1/query", "value"
    if span is not None:
        asked |= {"start": f"{span.begin_s:.3f}", "end": f"{span.end_s:.3f}", "step": f"{span.step_s:.3f}"}
        path, key = "/api/v1/query_range", "values"
    answer = _answer_of(cluster, where, asked, path)
    try:
        return [
            QueriedSeries(
                {name: str(each["metric"][name]) for name in (*each["metric"], *labels)},
                [(float(at_s), float(value)) for at_s, value in (each[key] if span else [each[key]])],
            )
            for each in answer["data"]["result"]
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UnavailableError(f"the answer of Prometheus at {where} cannot be read") from error


def _answer_of(cluster: Cluster, where: str, query: Mapping[str, str], path: str) -> dict[str, Any]:
    if not where.startswith(("http://", "https://")):
        if not _SERVICE.fullmatch(where):
            raise InputError(
                f"--prometheus {quoted(where)} is neither a URL such as http://prometheus:9090 nor "
                "NAMESPACE/SERVICE:PORT"
            )
        return cluster.proxied(where, path, query)
    url = f"{where.rstrip('/')}{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:  # noqa: S310  # the scheme is checked above
            found: dict[str, Any] = json.load(reply)
            return found
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise UnavailableError(
            f"Prometheus at {where} does not answer ({said(str(error))}): check the address"
        ) from error
