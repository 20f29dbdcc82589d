"""The samples that entered the final weights, read from the logs of all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def lineage(folder: Path | str) -> dict[int, list[int]]:
    """Return the sample ids of each epoch, by epoch, in the order in which they entered the final weights.

    Args:
        folder: folder with the logs of all ranks of a job, including dead ones.

    Raises:
        ValueError: two ranks logged contradictory samples for one step of one formation.
    """
    newest: dict[int, tuple[tuple[int, int], dict[str, Any]]] = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line: dict[str, Any] = json.loads(text)
            except ValueError:
                continue  # the last line of a process that was killed while it wrote
            order = (line["generation"], line["formation"])
            known = newest.get(line["step"])
            if known is not None and known[0] == order:
                _check(known[1], line)
            if known is None or order > known[0]:
                newest[line["step"]] = (order, line)
    epochs: dict[int, list[int]] = {}
    for step in sorted(newest):
        line = newest[step][1]
        epochs.setdefault(line["epoch"], []).extend(line["batch_ids"])
    return epochs


def _check(one: dict[str, Any], other: dict[str, Any]) -> None:
    own: Sequence[int] = other["ids"]
    # Lines of earlier versions lack "start"; there, each rank had a share of its own.
    start = other["start"] if "start" in other else sum(other["shares"][: other["rank"]])
    if one["batch_ids"] != other["batch_ids"] or other["batch_ids"][start : start + len(own)] != list(own):
        raise ValueError(f"ranks {one['rank']} and {other['rank']} disagree on the samples of step {other['step']}")
