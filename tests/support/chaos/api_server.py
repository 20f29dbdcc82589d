"""Objects as the API server keeps them: versions, preconditions, owners, watches with a limited past.

What it accepts is not proof that a real API server does; the integration tests are. It keeps the rules on which the
operator's correctness rests: optimistic concurrency, uids, graceful deletion, garbage collection, ``410 Gone``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from heterotrain_operator.cluster_state.parse import rfc3339

Body = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace and name."""


class Refused(Exception):  # noqa: N818  # named for the event
    """The server's refusal, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Change(NamedTuple):
    """One change of an object, as a watch delivers it; ``text`` is the object as JSON."""

    version: int
    kind: str
    plural: str
    text: str


@dataclass(frozen=True, slots=True)
class Write:
    """A write by a client, for the judges of a history.

    Attributes:
        who: the client.
        verb: ``create``, ``update`` or ``delete``.
        before: the object before, ``None`` for a new one.
        after: the object after, ``None`` for a deleted one.
    """

    who: str
    verb: str
    key: Key
    before: Body | None
    after: Body | None


@dataclass
class ApiServer:
    """The objects, and everything that has happened to them.

    Attributes:
        now_s: returns the server's time, in seconds since the epoch.
        objects: by key. Change them by ``put`` and ``drop`` only.
        changes: what watches can still deliver; older changes are ``Gone``.
        observers: called after each write.
        refuse: called before each write by a client; may raise ``Refused``, as admission does.
    """

    now_s: Callable[[], float]
    objects: dict[Key, Body] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    observers: list[Callable[[Write], None]] = field(default_factory=list)
    refuse: Callable[[str, str, Body], None] = lambda _verb, _plural, _body: None
    version: int = 1000
    compacted: int = 1000
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _uids: int = 0

    # --- for everybody -----------------------------------------------------------------------------------------------

    def of(self, plural: str) -> list[Body]:
        """Return all objects of a kind, in order of their names; do not change them."""
        return [self.objects[key] for key in sorted(key for key in self.objects if key[0] == plural)]

    def find(self, plural: str, namespace: str, name: str) -> Body | None:
        """Return a copy of an object."""
        found = self.objects.get((plural, namespace, name))
        return None if found is None else json.loads(json.dumps(found))

    def put(self, plural: str, body: Body, *, who: str = "cluster") -> Body:
        """Store an object, new or changed, whatever its version; an unchanged one stays as it is."""
        metadata = body["metadata"]
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        before = self.objects.get(key)
        if before is None:
            self._uids += 1
            metadata.setdefault("uid", f"uid-{plural}-{self._uids}")
            metadata.setdefault("creationTimestamp", rfc3339(self.now_s()))
            metadata.setdefault("generation", 1)
        elif before == body:
            return before
        else:
            for name in ("uid", "creationTimestamp", "generation"):
                metadata.setdefault(name, before["metadata"][name])
        if before is not None and before.get("spec") != body.get("spec") and plural == "heterotrainjobs":
            metadata["generation"] = before["metadata"]["generation"] + 1
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        self.objects[key] = stored = json.loads(json.dumps(body))
        self._note("MODIFIED" if before else "ADDED", key, stored)
        self._tell(Write(who, "update" if before else "create", key, before, stored))
        return stored

    def drop(self, key: Key, *, who: str = "cluster") -> None:
        """Remove an object at once."""
        before = self.objects.pop(key, None)
        if before is not None:
            self.version += 1
            gone = {**before, "metadata": {**before["metadata"], "resourceVersion": str(self.version)}}
            self._note("DELETED", key, gone)
            self._tell(Write(who, "delete", key, before, None))

    def collect_garbage(self) -> None:
        """Delete what belongs to deleted owners, as the garbage collector does some time later."""
        living = {body["metadata"]["uid"] for body in self.objects.values()}
        for key, body in sorted(self.objects.items()):
            owners = body["metadata"].get("ownerReferences") or ()
            if owners and all(owner["uid"] not in living for owner in owners):
                self.delete(key)

    def delete(self, key: Key, *, uid: str | None = None, who: str = "cluster") -> None:
        """Delete an object; a pod on a node stays until its kubelet confirms the end.

        Raises:
            Refused: it does not exist, or has another uid.
        """
        found = self.find(*key)
        if found is None:
            raise Refused(404, f"{key[0]} {key[2]!r} not found")
        if uid is not None and found["metadata"]["uid"] != uid:
            raise Refused(409, f"{key[2]}: the UID in the precondition differs")
        ended = (found.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if key[0] == "pods" and found["spec"].get("nodeName") and not ended:
            if "deletionTimestamp" not in found["metadata"]:
                found["metadata"]["deletionTimestamp"] = rfc3339(self.now_s())
                self.put("pods", found, who=who)
            return
        self.drop(key, who=who)

    def compact(self) -> None:
        """Forget the past: watches that are not up to date get ``410 Gone``."""
        self.changes.clear()
        self.compacted = self.version

    def since(self, version: int, plural: str) -> Iterator[Change]:
        """Yield the changes of a kind after a version.

        Raises:
            Refused: ``410``, because the past is forgotten.
        """
        if version < self.compacted:
            raise Refused(410, "too old resource version")
        found = []
        for change in reversed(self.changes):
            if change.version <= version:
                break
            if change.plural == plural:
                found.append(change)
        yield from reversed(found)

    # --- requests of clients -----------------------------------------------------------------------------------------

    def request(
        self, who: str, method: str, path: str, *, query: dict[str, str], form: str = "", body: Body | None = None
    ) -> Body:
        """Answer a request.

        Raises:
            Refused: with the status that Kubernetes gives.
        """
        plural, namespace, name, subresource = _parts(path)
        key = (plural, namespace, name)
        if method == "GET":
            return self._read(key, query)
        if method == "DELETE":
            self.delete(key, uid=((body or {}).get("preconditions") or {}).get("uid"), who=who)
            return {"kind": "Status", "status": "Success"}
        assert body is not None
        given: Body = json.loads(json.dumps(body))
        self.refuse(method, plural, given)
        if method == "POST":
            return self._create(who, plural, given, dry_run="dryRun" in query)
        if method == "PUT":
            return self._replace(who, key, given)
        if form == "application/apply-patch+yaml":
            return self._apply(who, key, given, subresource, force="force" in query)
        return self._merge(who, key, given)

    def _read(self, key: Key, query: dict[str, str]) -> Body:
        if key[2]:
            if (found := self.find(*key)) is None:
                raise Refused(404, f"{key[0]} {key[2]!r} not found")
            return found
        items = [body for body in self.of(key[0]) if key[1] in ("", body["metadata"].get("namespace", ""))]
        items = [body for body in items if selected(body, query.get("labelSelector", ""))]
        return {"items": items, "metadata": {"resourceVersion": str(self.version)}}

    def _create(self, who: str, plural: str, body: Body, *, dry_run: bool) -> Body:
        metadata = body["metadata"]
        if (plural, metadata.get("namespace", ""), metadata["name"]) in self.objects:
            raise Refused(409, f"{plural} {metadata['name']!r} already exists")
        if dry_run:
            return body
        if plural == "pods":
            body["status"] = {"phase": "Pending"}
        return self.put(plural, body, who=who)

    def _replace(self, who: str, key: Key, body: Body) -> Body:
        known = self._known(key)
        if (
            body["metadata"].get("resourceVersion", known["metadata"]["resourceVersion"])
            != (known["metadata"]["resourceVersion"])
        ):
            raise Refused(409, f"{key[2]}: the object has been modified")
        if body["metadata"].get("uid", known["metadata"]["uid"]) != known["metadata"]["uid"]:
            raise Refused(409, f"{key[2]}: the UID in the precondition differs")
        kept = {name: known["metadata"][name] for name in ("uid", "creationTimestamp", "generation", "resourceVersion")}
        body["metadata"] |= kept
        return self.put(key[0], body, who=who)

    def _apply(self, who: str, key: Key, body: Body, subresource: str, *, force: bool) -> Body:
        known = self.find(*key)
        metadata = body["metadata"]
        if known is None:
            if subresource or "uid" in metadata or "resourceVersion" in metadata:
                raise Refused(404, f"{key[0]} {key[2]!r} not found")
            return self.put(key[0], body, who=who)
        for name in ("uid", "resourceVersion"):
            if metadata.get(name, known["metadata"][name]) != known["metadata"][name]:
                raise Refused(409, f"{key[2]}: {name} differs")
        if subresource:
            return self.put(key[0], {**known, subresource: body[subresource]}, who=who)
        if not force and not known["metadata"].get("ownerReferences"):
            raise Refused(409, f"{key[2]}: conflict with another manager")
        return self.put(key[0], {**known, **body, "metadata": {**known["metadata"], **metadata}}, who=who)

    def _merge(self, who: str, key: Key, patch: Body) -> Body:
        known = self._known(key)
        uid = patch.get("metadata", {}).pop("uid", known["metadata"]["uid"])
        if uid != known["metadata"]["uid"]:
            raise Refused(409, f"{key[2]}: the UID in the precondition differs")
        return self.put(key[0], merged(known, patch), who=who)

    def _known(self, key: Key) -> Body:
        known = self.find(*key)
        if known is None:
            raise Refused(404, f"{key[0]} {key[2]!r} not found")
        return known

    def _note(self, kind: str, key: Key, body: Body) -> None:
        self.changes.append(Change(self.version, kind, key[0], json.dumps(body)))
        news, self.news = self.news, asyncio.Event()
        news.set()

    def _tell(self, write: Write) -> None:
        for observer in self.observers:
            observer(write)


def merged(target: Body, patch: Body) -> Body:
    """Return a copy of an object with a JSON merge patch."""
    found = dict(target)
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict):
            known = found.get(name)
            found[name] = merged(known if isinstance(known, dict) else {}, value)
        else:
            found[name] = value
    return found


def _parts(path: str) -> tuple[str, str, str, str]:
    """Return plural, namespace, name and subresource of a URL path."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = parts[1] if parts[0] == "namespaces" and len(parts) > 2 else ""
    parts = [*(parts[2:] if namespace else parts), "", ""]
    return parts[0], namespace, parts[1], parts[2]


def selected(body: Body, selector: str) -> bool:
    """Return whether an object's labels are as a selector wants them; ``!name`` is for those without a label."""
    labels = body["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        name, _, value = term.partition("!=" if "!=" in term else "=")
        if name[1:] in labels if term.startswith("!") else (labels.get(name) == value) is ("!=" in term):
            return False
    return True
