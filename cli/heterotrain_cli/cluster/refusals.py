"""From an answer of the API server that is not a success to one sentence with the next step.

Rules of the custom resource are this project's own sentences, which name the remedy: they are repeated as they are.
Other text is quoted in part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click
from heterotrain_core.contract import keys
from heterotrain_core.uris import redacted
from heterotrain_operator.api.text import quoted

from heterotrain_cli.errors import ChangedError, InputError, UnavailableError

_FIRST_FAILURE = 500
"""The first HTTP status that is the server's own failure."""
_SERVICE = "service "
_OF_SERVICES: Mapping[int, str] = {
    403: "not allowed to reach service {name} in namespace {where} ({said}): ask for the right to get services/proxy "
    "there, or give a URL",
    404: "there is no service {name} in namespace {where}: `kubectl get services -A` lists all",
}


def refusal(status: int, raw: bytes, what: str, namespace: str) -> click.ClickException:
    """Return the error for an answer.

    Args:
        status: HTTP status, at least 400.
        raw: body of the answer.
        what: the object of the request, such as ``job digits``.
        namespace: of the request.
    """
    document = _document(raw)
    message = str(document.get("message") or raw.decode(errors="replace") or f"HTTP {status}")
    if what.startswith(_SERVICE) and status in _OF_SERVICES:
        where, _, name = what.removeprefix(_SERVICE).partition("/")
        return InputError(_OF_SERVICES[status].format(name=quoted(name), where=quoted(where), said=said(message)))
    match status:
        case 404 if "could not find the requested resource" in message:
            return InputError("this cluster has no HeteroTrainJobs: install the operator's chart first")
        case 404:
            return InputError(f"there is no {what} in namespace {namespace}: `heterotrain get -A` lists all jobs")
        case 409 if "already exists" in message:
            return InputError(f"{what} exists already: choose another name, or delete it first")
        case 409:
            return ChangedError(f"{what} was changed by another program at the same time: try again")
        case 401:
            return InputError(f"the cluster does not accept your credentials ({said(message)}): log in to it again")
        case 403:
            return InputError(
                f"not allowed to read or change {what} ({said(message)}): ask for the role view or edit in namespace "
                f"{namespace}"
            )
        case _ if status >= _FIRST_FAILURE:
            return UnavailableError(f"the API server failed ({said(message)}): try again later")
    if own := _own_sentence(document, message):
        return InputError(own)
    kind, _, rest = message.partition(" is invalid: ")
    foreign = rest if rest and kind.startswith(keys.KIND) else message
    return InputError(f"the API server refuses {what} ({said(foreign)}): `kubectl apply` shows its whole answer")


def said(text: str) -> str:
    """Return foreign text in quotation marks: on one line, at most 60 characters, without passwords."""
    return f'"{quoted(redacted(" ".join(text.split())))}"'


def _document(raw: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:  # a proxy's answer, for example
        return {}
    return found if isinstance(found, Mapping) else {}


def _own_sentence(document: Mapping[str, Any], message: str) -> str:
    """Return the first rule of the custom resource that the answer names, with its field; empty without one."""
    from heterotrain_operator.api.crd import crd  # noqa: PLC0415  # only a refusal needs it

    found = sorted({(message.index(rule), rule) for rule in _rules(crd()) if rule in message})
    if not found:
        return ""
    _, first = found[0]
    causes = (document.get("details") or {}).get("causes") or []
    field = next((str(each.get("field") or "") for each in causes if first in str(each.get("message"))), "")
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{field}: {first}{more}" if field else f"{first}{more}"


def _rules(node: Any) -> Iterator[str]:
    """Yield the sentences of all rules in a schema."""
    if isinstance(node, Mapping):
        yield from (str(rule["message"]) for rule in node.get("x-kubernetes-validations") or () if "message" in rule)
        for each in node.values():
            yield from _rules(each)
    elif isinstance(node, list):
        for each in node:
            yield from _rules(each)
