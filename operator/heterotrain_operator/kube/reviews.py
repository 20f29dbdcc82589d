"""Authenticates clients of the operator's metrics, and asks whether they may read them: the API server answers both."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from heterotrain_operator.kube.errors import KubeError
from heterotrain_operator.kube.resources import Resource
from heterotrain_operator.kube.verbs import Kube

TOKEN_REVIEWS: Final = Resource("authentication.k8s.io/v1", "tokenreviews")
ACCESS_REVIEWS: Final = Resource("authorization.k8s.io/v1", "subjectaccessreviews")
KEPT_S = 60.0
"""An answer is valid for so long; a scraper asks with the same token every few seconds."""
MOST_KEPT = 1000
MOST_TOKEN = 16 * 1024
"""Bytes of a token; longer ones are refused without a question."""
AT_ONCE = 4
"""Questions at the same time, whoever asks for metrics."""


class MetricsAccess:
    """Answers whether a token may read the metrics, by TokenReview and SubjectAccessReview."""

    def __init__(self, kube: Kube, *, path: str, monotonic: Callable[[], float]) -> None:
        self._kube = kube
        self._path = path
        self._monotonic = monotonic
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._answers: OrderedDict[str, tuple[bool, float]] = OrderedDict()

    async def allows(self, token: str) -> bool:
        """Return whether the token's user may ``get`` the path; without an answer of the API server it may not."""
        if not token or len(token) > MOST_TOKEN:
            return False
        key = hashlib.sha256(token.encode()).hexdigest()
        async with self._limit:
            known = self._answers.get(key)
            if known is not None and known[1] > self._monotonic():
                return known[0]
            try:
                answer = await self._ask(token)
            except KubeError:
                return False
            self._answers[key] = (answer, self._monotonic() + KEPT_S)
            self._answers.move_to_end(key)
            while len(self._answers) > MOST_KEPT:
                self._answers.popitem(last=False)
            return answer

    async def _ask(self, token: str) -> bool:
        review = await self._kube.create(
            TOKEN_REVIEWS,
            {
                "apiVersion": TOKEN_REVIEWS.api_version,
                "kind": "TokenReview",
                "metadata": {"namespace": ""},
                "spec": {"token": token},
            },
        )
        status = review.get("status") or {}
        if status.get("authenticated") is not True:
            return False
        user = status.get("user") or {}
        access = await self._kube.create(
            ACCESS_REVIEWS,
            {
                "apiVersion": ACCESS_REVIEWS.api_version,
                "kind": "SubjectAccessReview",
                "metadata": {"namespace": ""},
                "spec": {
                    "user": user.get("username", ""),
                    "groups": user.get("groups") or [],
                    "uid": user.get("uid", ""),
                    "extra": user.get("extra") or {},
                    "nonResourceAttributes": {"path": self._path, "verb": "get"},
                },
            },
        )
        return (access.get("status") or {}).get("allowed") is True
