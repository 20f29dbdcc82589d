"""What to write in place of names that scripts bring along from other libraries."""

from __future__ import annotations

import re
from typing import Final

_RANKS: Final = (
    "ranks come and go while a job runs: job.is_leader is true on one of them, job.part divides data, and job.sum adds "
    "up numbers"
)
_ATTRIBUTES: Final = {
    "StepResult": {
        "lr": "result.learning_rate", "grad_norm": "result.gradient_norm", "norm": "result.gradient_norm",
        "batch_size": "result.samples",
    },
    "Step": {
        "loss": "result = step.apply(optimizer), and result.loss", "step": "step.number", "global_step": "step.number",
        "index": "step.number", "batch_size": "step.batch_samples", "result": "result = step.apply(optimizer)",
    },
    "Job": {
        "is_main_process": "job.is_leader", "is_master": "job.is_leader", "prepare": "job.wrap and job.optimizer",
        "backward": "step.backward", "gather": "job.sum in a hook, or step.all_gather", "log": "job.report",
        "all_reduce": "job.sum", "save": "init(checkpoint_uri=…), or torch.save if job.is_leader",
    },
    "Module": {
        "module": "the model itself, which job.wrap returns as it is",
        "no_sync": "nothing in its place: gradients travel once in a step, however it is cut into micro-batches",
    },
}  # fmt: skip
"""What is meant by class and name."""
_ARGUMENTS: Final = {
    "retain_graph": "leave it out: add up losses that share a graph, and call step.backward once for each micro-batch",
    "create_graph": "compute the gradient in the loss, by torch.autograd.grad(…, create_graph=True)",
    "max_norm": "write step.apply(optimizer, clip_norm=…)",
}
"""What to do in place of an argument of ``Tensor.backward``, or of clipping."""
_UNKNOWN: Final = re.compile(r"\bStep(?:Passes)?\.\w+\(\) got an unexpected keyword argument '(\w+)'")


def advice(error: BaseException) -> str:
    """Return what to do about an error of a script that has been ported; empty where nothing is known."""
    if isinstance(error, AttributeError):
        if type(error.obj).__name__ == "Job" and error.name in ("rank", "world_size", "local_rank", "num_processes"):
            return f"heterotrain: {_RANKS}"
        kinds = [kind.__name__ for kind in type(error.obj).__mro__]
        meant = next(
            (found[error.name] for kind, found in _ATTRIBUTES.items() if kind in kinds and error.name in found), ""
        )
        return f"heterotrain: in place of .{error.name}, write {meant}" if meant else ""
    unknown = _UNKNOWN.search(str(error)) if isinstance(error, TypeError) else None
    if unknown is not None and unknown[1] in _ARGUMENTS:
        return f"heterotrain: in place of {unknown[1]}=, {_ARGUMENTS[unknown[1]]}"
    if isinstance(error, ValueError | RuntimeError) and "init_process_group" in str(error):
        return (
            "heterotrain: leave out DistributedDataParallel, which job.wrap takes the place of. Other calls of "
            "torch.distributed work inside `with step:` and in hooks, and not before job.steps"
        )
    return ""
