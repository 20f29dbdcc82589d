"""Drafts from manifests of other projects. What a draft cannot hold becomes a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from heterotrain_core.contract import keys
from heterotrain_operator.api.text import quoted

from heterotrain_cli.convert.draft import Draft
from heterotrain_cli.convert.kubeflow import from_mpi_job, from_pytorch_job, from_train_job
from heterotrain_cli.convert.ray import from_ray_job
from heterotrain_cli.convert.rest import Rest, WrongPartError
from heterotrain_cli.convert.skypilot import from_skypilot
from heterotrain_cli.errors import InputError

_TASK: Final = "SkyPilot task"
_BY_KIND: Final[Mapping[str, Callable[[Rest], Draft]]] = {
    "PyTorchJob": from_pytorch_job, "TrainJob": from_train_job, "RayJob": from_ray_job, "MPIJob": from_mpi_job,
    _TASK: from_skypilot,
}  # fmt: skip
KNOWN: Final = ", ".join(_BY_KIND)


def draft_of(documents: Sequence[Mapping[str, Any]], *, where: str) -> Draft:
    """Return the draft for the only job in a file.

    Raises:
        InputError: there is none or more than one, its format is not known, or an essential part is missing.
    """
    known = [each for each in documents if format_of(each)]
    if len(known) > 1:
        raise InputError(f"{where}: holds {len(known)} jobs: give one at a time")
    if not documents:
        raise InputError(f"{where}: holds no manifest: give one of {KNOWN}")
    if any(each.get("kind") == keys.KIND for each in documents):
        raise InputError(f"{where}: is a {keys.KIND} already: `heterotrain submit {where}` creates it")
    if not known:
        kind = documents[0].get("kind")
        named = f"kind {quoted(str(kind))}" if kind is not None else "a document without a kind"
        raise InputError(f"{where}: {named} cannot be converted: known are {KNOWN}")
    document, kind = Rest(known[0]), format_of(known[0])
    try:
        draft = _BY_KIND[kind](document)
        draft.join_queue()
    except WrongPartError as error:
        raise InputError(f"{where}: not a complete {kind}, because {error}: correct it") from error
    except KeyError as error:
        raise InputError(f"{where}: not a complete {kind}, because it has no {error.args[0]}: add it") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: not a complete {kind}, because a value has another type than in its documentation: compare them"
        ) from error
    draft.notes += [f"left out: {line}" for line in document.left()]
    for other in documents:
        if other is not known[0]:
            name = (other.get("metadata") or {}).get("name", other.get("name", ""))
            draft.notes.append(f"left out: {other.get('kind', 'the document')} {name} of the same file")
    return draft


def format_of(document: Mapping[str, Any]) -> str:
    """Return the name of a manifest's format; empty for one that cannot be converted."""
    kind = document.get("kind")
    if kind is None and ("run" in document or "resources" in document):
        return _TASK
    return str(kind) if kind in _BY_KIND else ""
