"""The user's cluster, reached as kubectl reaches it, in plain JSON.

Every failure is one sentence. ``UnavailableError`` is a missing answer, ``InputError`` a refused request.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlencode

import urllib3
from heterotrain_core.contract import keys
from heterotrain_core.version import __version__
from heterotrain_operator.api.text import quoted
from heterotrain_operator.cluster_state.containers import training_container

from heterotrain_cli.cluster.credentials import LoginError
from heterotrain_cli.cluster.kubeconfig import load
from heterotrain_cli.cluster.refusals import refusal, said
from heterotrain_cli.cluster.target import Target
from heterotrain_cli.errors import ChangedError, InputError, UnavailableError

TIMEOUT_S: Final = 30
PAGE_SIZE: Final = 500
CHANGE_TRIES: Final = 5
"""A change of what was read is tried so often: the operator may write the job's status in between."""
READ_TRIES: Final = 3
"""An API server that restarts does not end a command that watches a job."""
RETRY_S: Final = 1.0
FIELD_MANAGER: Final = "heterotrain"
"""Of all writes: a server-side apply by another tool names it in a conflict."""
_CHUNK_BYTES: Final = 1 << 16
_FIRST_ERROR = 400
"""The first HTTP status that is an error."""
_ROOT = f"/apis/{keys.GROUP}/{keys.VERSION}"
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a worker's log."""

    worker: str
    text: str


class Cluster:
    """The cluster, seen with the user's own rights.

    Attributes:
        namespace: where the commands look by default.
    """

    def __init__(self, target: Target, *, timeout_s: float = TIMEOUT_S, read_tries: int = READ_TRIES) -> None:
        """Read the kubeconfig; nothing is sent yet.

        Args:
            target: which cluster, and where in it.
            timeout_s: longest wait for each answer.
            read_tries: how often a read is sent until it is answered.

        Raises:
            UnavailableError: there is no usable kubeconfig.
        """
        self._access, self.namespace = load(target)
        self._timeout_s, self._read_tries = timeout_s, read_tries

    # -- jobs --------------------------------------------------------------------------------------------------------

    def job(self, name: str) -> dict[str, Any]:
        """Return a job.

        Raises:
            InputError: there is no such job.
            UnavailableError: the cluster does not answer.
        """
        return self._json("GET", self._path(name), what=f"job {name}")

    def find(self, name: str) -> dict[str, Any] | None:
        """Return a job; ``None`` where there is none of this name.

        Raises:
            UnavailableError: the cluster does not answer.
        """
        return next((body for body in self.jobs() if body["metadata"]["name"] == name), None)

    def jobs(self, *, everywhere: bool = False) -> list[dict[str, Any]]:
        """Return the jobs of the namespace, or of all namespaces."""
        return list(self._list(f"{_ROOT}/{keys.PLURAL}" if everywhere else self._path()))

    def create(self, body: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create a job, or let the API server check it only (``dry_run``); return it with its defaults.

        Raises:
            InputError: the API server refuses it, or it exists.
            UnavailableError: the cluster does not answer.
        """
        query = {"fieldValidation": "Strict", "fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return self._json("POST", self._path(), query=query, body=body, what=f"job {body['metadata']['name']}")

    def patch(self, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change fields of a job (JSON merge patch); return it.

        Raises:
            InputError: there is no such job, or the API server refuses the change.
            UnavailableError: the cluster does not answer.
        """
        query = {"fieldManager": FIELD_MANAGER}
        return self._json("PATCH", self._path(name), query=query, body=patch, what=f"job {name}")

    def change(self, name: str, patch_of: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        """Change a job by a patch that is made from its present state, again if another writer was faster.

        A patch with the state's ``resourceVersion`` is refused after any other change, the operator's too.

        Raises:
            InputError: there is no such job, the API server refuses the change, or others change the job all the time.
            UnavailableError: the cluster does not answer.
        """
        for left in reversed(range(CHANGE_TRIES)):
            try:
                self.patch(name, patch_of(self.job(name)))
            except ChangedError:
                if not left:
                    raise
            else:
                return

    def delete(self, name: str) -> None:
        """Delete a job with everything that belongs to it.

        Raises:
            InputError: there is no such job.
            UnavailableError: the cluster does not answer.
        """
        self._json("DELETE", self._path(name), body={"propagationPolicy": "Background"}, what=f"job {name}")

    # -- what belongs to a job ---------------------------------------------------------------------------------------

    def pods(self, job: str) -> list[dict[str, Any]]:
        """Return the pods of a job's workers, by name."""
        query = {"labelSelector": f"{keys.LABEL_JOB}={job}"}
        found = self._list(f"/api/v1/namespaces/{self.namespace}/pods", query=query)
        return sorted(found, key=lambda pod: _index(pod["metadata"]["name"]))

    def events(self, job: str) -> list[dict[str, Any]]:
        """Return the events of a job, oldest first."""
        fields = f"involvedObject.kind={keys.KIND},involvedObject.name={job}"
        found = list(self._list(f"/api/v1/namespaces/{self.namespace}/events", query={"fieldSelector": fields}))
        return sorted(found, key=event_time)

    def config_map(self, name: str) -> dict[str, Any]:
        """Return a ConfigMap.

        Raises:
            InputError: there is none of this name.
            UnavailableError: the cluster does not answer.
        """
        path = f"/api/v1/namespaces/{self.namespace}/configmaps/{name}"
        return self._json("GET", path, what=f"ConfigMap {name}")

    def create_config_map(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create a ConfigMap; return it.

        Raises:
            InputError: the API server refuses it, or it exists.
            UnavailableError: the cluster does not answer.
        """
        path = f"/api/v1/namespaces/{self.namespace}/configmaps"
        query = {"fieldManager": FIELD_MANAGER}
        return self._json("POST", path, query=query, body=body, what=f"ConfigMap {body['metadata']['name']}")

    def proxied(self, service: str, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return what a service in the cluster answers, through the API server.

        Args:
            service: ``NAMESPACE/NAME:PORT``.
            path: of the request to the service, with its first slash.
            query: of the request.

        Raises:
            InputError: there is no such service, or the user may not reach it.
            UnavailableError: there is no answer.
        """
        namespace, _, name = service.partition("/")
        full = f"/api/v1/namespaces/{namespace}/services/{name}/proxy{path}"
        return self._json("GET", full, query=query, what=f"service {service}")

    def log_lines(
        self,
        pod: Mapping[str, Any],
        container: str | None = None,
        *,
        follow: bool = False,
        tail: int | None = None,
        previous: bool = False,
        since_s: int | None = None,
    ) -> Iterator[LogLine]:
        """Yield the lines of the log of a container, the training one by default, without their line ends.

        Raises:
            InputError: there is no such log.
            UnavailableError: the cluster does not answer.
        """
        name, chosen = str(pod["metadata"]["name"]), container or training_container(pod)["name"]
        query = {"container": chosen, "follow": str(follow).lower(), "previous": str(previous).lower()}
        query |= {"tailLines": str(tail)} if tail is not None else {}
        query |= {"sinceSeconds": str(since_s)} if since_s is not None else {}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/log"
        what = f"log of pod {name}"
        with _no_answer():
            response = self._send("GET", path, query=query, timeout_s=None if follow else self._timeout_s)
            if response.status >= _FIRST_ERROR:
                raise refusal(response.status, response.data, what, self.namespace)
            try:
                rest = b""
                for chunk in response.stream(_CHUNK_BYTES, decode_content=True):
                    *lines, rest = (rest + chunk).split(b"\n")
                    yield from (LogLine(name, line.decode(errors="replace")) for line in lines)
                if rest:
                    yield LogLine(name, rest.decode(errors="replace"))
            finally:
                response.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _path(self, name: str | None = None) -> str:
        if name is not None and not _NAME.fullmatch(name):
            raise InputError(f'"{quoted(name)}" is not a name of a job: `heterotrain get -A` lists all jobs')
        path = f"{_ROOT}/namespaces/{self.namespace}/{keys.PLURAL}"
        return path if name is None else f"{path}/{name}"

    def _list(self, path: str, *, query: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
        left = ""
        while True:
            more = {"continue": left} if left else {}
            page = self._json(
                "GET", path, query={"limit": str(PAGE_SIZE), **(query or {}), **more}, what="the list of objects"
            )
            yield from page["items"]
            left = page["metadata"].get("continue") or ""
            if not left:
                return

    def _json(
        self, method: str, path: str, *, what: str, query: Mapping[str, str] | None = None, body: Any = None
    ) -> dict[str, Any]:
        tries = self._read_tries if method == "GET" else 1  # a write may have been done although its answer is lost
        for left in reversed(range(tries)):
            try:
                return self._once(method, path, what=what, query=query or {}, body=body)
            except UnavailableError:
                if not left:
                    raise
                time.sleep(RETRY_S)
        raise AssertionError("unreachable: the last try returns or raises")

    def _once(self, method: str, path: str, *, what: str, query: Mapping[str, str], body: Any) -> dict[str, Any]:
        with _no_answer():
            response = self._send(method, path, query=query, body=body, timeout_s=self._timeout_s)
            if response.status >= _FIRST_ERROR:
                raise refusal(response.status, response.data, what, self.namespace)
            found: dict[str, Any] = json.loads(response.data)
            return found

    def _send(
        self, method: str, path: str, *, query: Mapping[str, str], timeout_s: float | None, body: Any = None
    ) -> urllib3.BaseHTTPResponse:
        """Return the response, whose body has not been read.

        Raises:
            LoginError: the program that logs the user in fails.
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json, */*", "Content-Type": kind, "User-Agent": f"heterotrain/{__version__}"}
        if authorization := self._access.authorization():
            headers["Authorization"] = authorization
        return self._access.connections.request(
            method, f"{self._access.server}{path}{'?' if query else ''}{urlencode(query)}", headers=headers,
            body=None if body is None else json.dumps(body).encode(), preload_content=False, redirect=False,
            timeout=urllib3.Timeout(connect=self._timeout_s, read=timeout_s),
        )  # fmt: skip


def cluster_for(namespace: str | None, target: Mapping[str, Any]) -> Cluster:
    """Return the cluster with the namespace of the option, else that of the file, else the context's."""
    chosen = Target(**target)
    return Cluster(replace(chosen, namespace=chosen.namespace or namespace))


@contextmanager
def _no_answer() -> Iterator[None]:
    """Turn the errors of a connection into one sentence.

    Raises:
        UnavailableError: there was one.
    """
    try:
        yield
    except LoginError as error:
        raise UnavailableError(f"no access to the cluster ({error}): log in to it again") from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise UnavailableError(
            f"the cluster does not answer ({said(str(error))}): check it with kubectl cluster-info"
        ) from error
    except ValueError as error:
        raise UnavailableError(
            f"the cluster's answer is not JSON ({said(str(error))}): check the address in the kubeconfig"
        ) from error


def event_time(event: Mapping[str, Any]) -> str:
    """Return the time of an event's newest occurrence in RFC 3339; both generations of events have it elsewhere."""
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
        or event["metadata"].get("creationTimestamp") or ""
    )  # fmt: skip


def _index(pod: str) -> tuple[int, str]:
    tail = pod.rpartition("-w")[2]
    return (int(tail) if tail.isdecimal() else -1, pod)
