"""Keywords of other libraries, and misspelt ones."""

from __future__ import annotations

from typing import Any

import heterotrain
import pytest
from heterotrain.errors import UsageError
from support.one_process import DATA, a_job


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 16}, "init has no argument batch_size: did you mean batch_samples?"),
        ({"num_epochs": 2}, "did you mean epochs?"),
        ({"batch_sample": 2}, "did you mean batch_samples?"),
        ({"zzz": 2}, "init has no argument zzz: it has epochs, steps, batch_samples"),
    ],
)
def test_the_keyword_that_was_meant_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        heterotrain.init(**given)


def test_methods_name_them_before_anything_runs() -> None:
    job, *_ = a_job()
    arguments: dict[str, Any] = {"num_workers": 2}
    with pytest.raises(UsageError, match=r"Job.steps has no argument num_workers: did you mean workers\?"):
        job.steps(DATA, **arguments)
