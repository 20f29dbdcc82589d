"""A model card: what an exported file was trained with, from the record of its run."""

from __future__ import annotations

import json
from typing import Any

from heterotrain_core.uris import redacted

from heterotrain.checkpoints.export import Weights

MOST_PLANS = 20


def model_card(weights: Weights, *, file: str, source: str, checked: str = "") -> str:
    """Return the card as Markdown.

    Args:
        weights: what was exported.
        file: name of the exported file.
        source: where its checkpoint is.
        checked: a sentence about the comparison of the file with the model; empty for none.
    """
    elements = sum(tensor.numel() for tensor in weights.tensors.values())
    about = f"{len(weights.tensors)} tensors with {elements:,} numbers"
    where = f"Step {weights.step}, epoch {weights.epoch}, of the checkpoints in `{redacted(source)}`: {about}."
    lines = [f"# {file}", "", where, *([checked] if checked else [])]
    try:
        record: dict[str, Any] = json.loads(weights.record)
    except ValueError:
        return "\n".join([*lines, "", "The checkpoints have no record of the run.", ""])
    settings, data, job = record.get("settings", {}), record.get("data", {}), record.get("job", {})
    if (at := record.get("progress", {}).get("steps")) not in (None, weights.step):
        lines.append(f"The record below was written at step {at}.")
    lines += ["", "## Run", "", "| what | value |", "| --- | --- |"]
    if isinstance(uri := settings.get("checkpoint_uri"), str):
        settings = settings | {"checkpoint_uri": redacted(uri)}
    rows = {
        "job": f"{job.get('namespace')}/{job.get('name')} ({job.get('uid')})",
        "seed": record.get("seed"),
        "data (SHA-256)": f"{data.get('sha256')}: {data.get('of')}",
        **{name.replace("_", " "): value for name, value in settings.items()},
    }
    lines += [f"| {name} | `{value}` |" for name, value in rows.items()]
    lines += ["", "## Versions", "", "| what | version |", "| --- | --- |"]
    lines += [f"| {name} | `{value}` |" for name, value in record.get("versions", {}).items()]
    plans = record.get("plans", [])
    lines += ["", "## Plans", "", "| from step | global batch | shares | workers |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {plan['from_step']} | {plan['global_batch_samples']} | {plan['shares']} | {', '.join(plan['workers'])} |"
        for plan in plans[-MOST_PLANS:]
    ]
    left_out = record.get("plans_left_out", 0) + max(0, len(plans) - MOST_PLANS)
    lines += [f"\n{left_out} earlier plans are left out."] if left_out else []
    return "\n".join([*lines, ""])
