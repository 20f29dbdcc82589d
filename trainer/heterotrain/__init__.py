"""The public names that a training script imports.

::

    job   = heterotrain.init()
    model = job.wrap(Net())
    opt   = job.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    for step in job.steps(train_set):
        with step:
            for x, y in step.micro_batches():
                step.backward(loss_fn(model(x), y))
            step.apply(opt)

Names are imported on first use: the launcher imports a module of this package and must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from heterotrain_core.extras import missing_extra
from heterotrain_core.version import __version__

if TYPE_CHECKING:
    from heterotrain.data.shard_cache import ShardCache
    from heterotrain.data.shards import Shards
    from heterotrain.errors import HeterotrainError, UsageError
    from heterotrain.fitting import fit
    from heterotrain.initialization import init
    from heterotrain.session import Job
    from heterotrain.steps.result import StepResult
    from heterotrain.steps.step import Step

__all__ = [
    "HeterotrainError",
    "Job",
    "ShardCache",
    "Shards",
    "Step",
    "StepResult",
    "UsageError",
    "__version__",
    "fit",
    "init",
]

_HOME = {
    "HeterotrainError": "heterotrain.errors",
    "Job": "heterotrain.session",
    "ShardCache": "heterotrain.data.shard_cache",
    "Shards": "heterotrain.data.shards",
    "Step": "heterotrain.steps.step",
    "StepResult": "heterotrain.steps.result",
    "UsageError": "heterotrain.errors",
    "fit": "heterotrain.fitting",
    "init": "heterotrain.initialization",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if sentence := missing_extra(error, what=f"heterotrain.{name}", extra="trainer"):
            raise ImportError(sentence) from None
        raise
    globals()[name] = value
    return value
