"""``docs/metrics.md``: every series that workers and operator export. ``make generate`` writes it."""

from __future__ import annotations

import ast
from typing import Final

from heterotrain_operator.engine.job_gauges import LABELS
from heterotrain_operator.engine.metrics import OperatorMetrics

from lab.cluster import REPOSITORY

PATH: Final = REPOSITORY / "docs/metrics.md"
CONTRACT: Final = REPOSITORY / "core/heterotrain_core/contract/metrics.py"
_ABOUT = """# Metrics

Generated from the sources by `make generate`. Names ending in `_total` are counters; compare differences of them
rather than `rate()`, which loses shares that were used for a few steps only. The other series are gauges or histograms.
A gauge without a value yet is not exported.

## Of each rank

Labels: `job_uid`, `worker` (the pod), `worker_uid`, `local_rank`. Series of a step's shape also have `share` and
`micro_batch`, in samples; `heterotrain_phase_seconds_total` has `phase` (load, forward, backward, sync, update,
compute, step).

| series | meaning |
| --- | --- |
"""
_OF_OPERATOR = """
## Of the operator

Series of a job have the labels {labels}.
`job` and `namespace` would be those of the scrape target, the operator.

| series | meaning |
| --- | --- |
"""
_KNOWN = {
    "STEPS": "Steps of this shape.",
    "SAMPLES": "Samples that the rank processed in steps of this shape.",
    "PHASE_SECONDS": "Seconds of each phase, summed over steps of this shape.",
    "PHASE_SECONDS_SQUARED": "Squared seconds of each phase, summed over steps, for variances.",
    "FIRST_BUCKET_FRACTION_SQUARED": "Its squares, summed.",
    "REPEATED_STEPS": "Steps that were repeated after a loss.",
    "OUT_OF_MEMORY": "Times that the device ran out of memory; the micro-batch was halved.",
    "CHECKPOINT_FAILURES": "Checkpoints that could not be written.",
    "READY": "1 once the script has reached `job.steps`.",
    "PLAN_GENERATION": "Generation of the plan in force: it grows with changes of membership.",
    "FORMATION": "Number of the formation within its generation.",
    "WORLD_SIZE": "Ranks in the formation.",
    "CURSOR": "Samples of the epoch that are committed.",
    "GLOBAL_BATCH": "The global batch, in samples.",
    "LOSS": "Mean loss of the newest step over the global batch.",
    "NOISE_SCALE": "Gradient noise scale, in samples.",
    "CHECKPOINT_STEP": "Committed steps of the newest checkpoint.",
    "CHECKPOINT_TIME": "Time of the newest checkpoint, in seconds since 1970.",
    "RESUMED_STEP": "Committed steps of the checkpoint of another job from which training continued.",
    "CHECKPOINT_PAUSE": "Seconds for which the newest checkpoint held up training.",
    "CHECKPOINT_DURATION": "Seconds until the newest checkpoint was in the store.",
}
"""For series whose name says enough in the sources."""


def text() -> str:
    """Return the document.

    Raises:
        KeyError: a series has no description.
    """
    tree = ast.parse(CONTRACT.read_text(encoding="utf-8"))
    rows = []
    for at, node in enumerate(tree.body):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(series))) if series.startswith(
                "heterotrain_"
            ):
                after = tree.body[at + 1] if at + 1 < len(tree.body) else None
                match after:
                    case ast.Expr(value=ast.Constant(value=str(about))):
                        meaning = " ".join(about.split())
                    case _:
                        meaning = _KNOWN[name]
                rows.append(f"| `{series}` | {meaning.replace('``', '`').replace('|', chr(92) + '|')} |")
            case _:
                pass
    own = [
        f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.documentation} |"
        for family in sorted(OperatorMetrics().registry.collect(), key=lambda each: each.name)
        if family.name.startswith("heterotrain_")
    ]
    labels = ", ".join(f"`{label}`" for label in LABELS)
    return _ABOUT + "\n".join(rows) + "\n" + _OF_OPERATOR.format(labels=labels) + "\n".join(own) + "\n"
