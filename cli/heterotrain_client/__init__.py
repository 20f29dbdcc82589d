"""Jobs from Python: submit a script or a function, wait, read logs and metrics.

::

    from heterotrain_client import HeteroTrainClient

    client = HeteroTrainClient()
    job = client.train("train.py", pools={"a100": 2, "t4": 6}, image=IMAGE, global_batch_size=512, epochs=20)
    job.wait()

It uses kubectl's configuration and the user's own rights. Mistakes are ``InputError``, missing answers of the cluster
``UnavailableError``: each is one sentence.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from heterotrain_core.extras import missing_extra
from heterotrain_core.version import __version__

if TYPE_CHECKING:
    from heterotrain_cli.errors import InputError, UnavailableError

    from heterotrain_client.client import HeteroTrainClient
    from heterotrain_client.job import JobFailedError, TrainingJob

__all__ = [
    "HeteroTrainClient",
    "InputError",
    "JobFailedError",
    "TrainingJob",
    "UnavailableError",
    "__version__",
]

_HOME = {
    "HeteroTrainClient": "heterotrain_client.client",
    "InputError": "heterotrain_cli.errors",
    "JobFailedError": "heterotrain_client.job",
    "TrainingJob": "heterotrain_client.job",
    "UnavailableError": "heterotrain_cli.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if sentence := missing_extra(error, what=f"heterotrain_client.{name}", extra="cli"):
            raise ImportError(sentence) from None
        raise
    globals()[name] = value
    return value
