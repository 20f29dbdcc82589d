"""The API server as the engine sees it: seven verbs on plain JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from heterotrain_operator.kube.resources import Resource

Body = dict[str, Any]


class Kube(Protocol):
    """What the engine needs of the API server.

    Every verb raises one of the errors in ``kube.errors``: ``NotFound``, ``Conflict``, ``Rejected``, ``Throttled`` or
    ``Unavailable``.
    """

    def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Body]:
        """Yield all objects, page by page, so that a large list is never in memory at once."""
        ...

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Body:
        """Return one object."""
        ...

    async def create(self, resource: Resource, body: Body, *, dry_run: bool = False) -> Body:
        """Create an object; the server refuses unknown fields."""
        ...

    async def replace(self, resource: Resource, body: Body) -> Body:
        """Replace an object if its ``resourceVersion`` is still the one in ``body``."""
        ...

    async def apply(self, resource: Resource, body: Body, *, subresource: str = "", force: bool = True) -> Body:
        """Apply the operator's fields of an object; without ``force``, other managers' values raise ``Conflict``."""
        ...

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Body, *, subresource: str = "") -> Body:
        """Merge a patch into an object; ``None`` removes a field."""
        ...

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str) -> None:
        """Delete an object if it is still the one with this uid."""
        ...


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7386) from one object to another; empty where they are equal.

    Lists are replaced as a whole. A value of ``None`` in ``after`` counts as absent, because a patch cannot set it.
    """
    patch: dict[str, Any] = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if inner := merge_patch(old, new):
                patch[name] = inner
        elif old != new or (name in before and new is None):
            patch[name] = new
    return patch
