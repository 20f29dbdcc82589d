"""Queries to Prometheus, through the API server or directly."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from heterotrain_operator.api.text import quoted

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.refusals import said
from heterotrain_cli.errors import InputError, UnavailableError

TIMEOUT_S: Final = 30
QUERY_RANGE: Final = "/api/v1/query_range"
_SERVICE: Final = re.compile(r"[a-z0-9.-]+/[a-z0-9.-]+:[a-z0-9-]+")


def answer_of(cluster: Cluster, where: str, query: Mapping[str, str], *, path: str = QUERY_RANGE) -> dict[str, Any]:
    """Return the answer of Prometheus to a query.

    Args:
        cluster: through whose API server a service is reached.
        where: as in ``from_prometheus``.
        query: parameters.
        path: of the request.

    Raises:
        InputError: the address has neither of its two forms.
        UnavailableError: there is none.
    """
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
