"""Test doubles for the engine: an API server that records calls and can fail, and a Prometheus with fixed answers."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound
from heterotrain_operator.kube.resources import EVENTS, Resource
from heterotrain_operator.prom.errors import PromError
from heterotrain_operator.prom.vector import Vector, VectorSample

from support.chaos.api_server import merged, selected

Body = dict[str, Any]


class FakeKube:
    """Objects in a dictionary; every write is recorded as ``(verb, plural, name)``.

    ``fail`` is called before each call and may return an error to raise.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Body] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.conflicts: set[tuple[str, str]] = set()
        """Plural and name of objects in which other managers have changed the operator's fields."""
        self.fail: Callable[[str, str, str], KubeError | None] = lambda *_: None
        self._version = 100

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        """Calls that change something, except Events."""
        return [call for call in self.calls if call[0] not in ("get", "list", "dry-run") and call[1] != EVENTS.plural]

    def _call(self, verb: str, resource: Resource, name: str) -> None:
        self.calls.append((verb, resource.plural, name))
        if (error := self.fail(verb, resource.plural, name)) is not None:
            raise error

    def _store(self, resource: Resource, body: Body) -> Body:
        self._version += 1
        key = (resource.plural, body["metadata"].get("namespace", ""), body["metadata"]["name"])
        stored = copy.deepcopy(body)
        known = self.objects.get(key, {})
        stored["metadata"] = {"uid": f"uid-{self._version}", **known.get("metadata", {}), **stored["metadata"]}
        stored["metadata"]["resourceVersion"] = str(self._version)
        self.objects[key] = stored
        return copy.deepcopy(stored)

    async def list(
        self, resource: Resource, namespace: str | None = None, *, fields: str = "", labels: str = ""
    ) -> AsyncIterator[Body]:
        """Yield the objects that the selectors allow."""
        self._call("list", resource, "")
        for (plural, where, _), body in list(self.objects.items()):
            if plural != resource.plural or namespace not in (None, where):
                continue
            if _has_fields(body, fields) and selected(body, labels):
                yield copy.deepcopy(body)

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Body:
        self._call("get", resource, name)
        try:
            return copy.deepcopy(self.objects[resource.plural, namespace or "", name])
        except KeyError:
            raise NotFound(name) from None

    async def create(self, resource: Resource, body: Body, *, dry_run: bool = False) -> Body:
        name = body["metadata"]["name"]
        self._call("dry-run" if dry_run else "create", resource, name)
        if (resource.plural, body["metadata"].get("namespace", ""), name) in self.objects:
            raise Conflict(f"{name} exists")
        return copy.deepcopy(body) if dry_run else self._store(resource, {**body, "status": {"phase": "Pending"}})

    async def replace(self, resource: Resource, body: Body) -> Body:
        name = body["metadata"]["name"]
        self._call("replace", resource, name)
        known = self.objects[resource.plural, body["metadata"].get("namespace", ""), name]
        if known["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise Conflict(f"{name} has changed")
        return self._store(resource, body)

    async def apply(self, resource: Resource, body: Body, *, subresource: str = "", force: bool = True) -> Body:
        metadata = body["metadata"]
        self._call(f"apply {subresource}".strip(), resource, metadata["name"])
        known = self.objects.get((resource.plural, metadata["namespace"], metadata["name"]), {})
        foreign = bool(known) and not known["metadata"].get("ownerReferences")
        if not (force or subresource) and (foreign or (resource.plural, metadata["name"]) in self.conflicts):
            raise Conflict("conflicts with another manager")
        return self._store(resource, {**known, **body, "metadata": {**known.get("metadata", {}), **metadata}})

    async def merge(self, resource: Resource, namespace: str, name: str, patch: Body, *, subresource: str = "") -> Body:
        self._call(f"merge {subresource}".strip(), resource, name)
        try:
            known = self.objects[resource.plural, namespace, name]
        except KeyError:
            raise NotFound(name) from None
        given = patch.get("metadata", {})
        if "uid" in given and given["uid"] != known["metadata"]["uid"]:
            raise Conflict(f"{name} has another uid")
        if int(given.get("resourceVersion", self._version)) < int(known["metadata"]["resourceVersion"]):
            raise Conflict(f"{name} has changed")
        return self._store(resource, merged(known, copy.deepcopy(patch)))

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str) -> None:
        self._call("delete", resource, name)
        found = self.objects.get((resource.plural, namespace, name))
        if found is None:
            raise NotFound(name)
        if found["metadata"]["uid"] != uid:
            raise Conflict(f"{name} has another uid")
        del self.objects[resource.plural, namespace, name]


def _has_fields(body: Body, selector: str) -> bool:
    for part in filter(None, selector.split(",")):
        path, _, expected = part.replace("!=", "=").partition("=")
        found: object = body
        for name in path.split("."):
            found = found.get(name, "") if isinstance(found, dict) else ""
        if (found == expected) == ("!=" in part):
            return False
    return True


class FakeProm:
    """Answers each query by ``answers``, or raises ``error``."""

    def __init__(self) -> None:
        self.answers: Callable[[str], tuple[VectorSample, ...]] = lambda _: ()
        self.error: PromError | None = None
        self.queries = 0

    async def query(self, promql: str) -> Vector:
        self.queries += 1
        if self.error is not None:
            raise self.error
        return Vector.of(self.answers(promql))
