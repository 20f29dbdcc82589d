"""Fields of log lines in both formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from heterotrain.errors import UsageError
from heterotrain.telemetry.logs import set_up_logs
from heterotrain_core.contract import env
from support.zygote import Zygote

SCRIPT = """
import logging, threading, warnings, heterotrain, torch
job = heterotrain.init(epochs=1, batch_samples=4)
model = job.wrap(torch.nn.Linear(1, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(12, 1))
for step in job.steps(data):
    with step:
        for (x,) in step.micro_batches():
            step.backward(model(x).mean())
        step.apply(opt)
    if step.number == 1:
        logging.getLogger("of.the.script").warning("two\\nlines")
        warnings.warn("of a library", stacklevel=1)
        thread = threading.Thread(target=lambda: 1 / 0, name="helper")
        thread.start()
        thread.join()
        raise KeyError("at the end")
"""


def lines_of(zygote: Zygote, tmp_path: Path, form: str) -> list[str]:
    """Run a script that logs, warns and fails; return its stderr."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = zygote.run(tmp_path, str(script), **{env.LOG_FORMAT: form})
    assert done.code == 1
    return done.stderr.splitlines()


def test_every_line_is_a_json_object_with_the_rank_and_its_progress(zygote: Zygote, tmp_path: Path) -> None:
    """This includes the script's records, warnings, and uncaught exceptions of a thread and of the script."""
    entries = [json.loads(line) for line in lines_of(zygote, tmp_path, "json")]
    found = [
        entry for entry in entries if entry["logger"] in ("of.the.script", "py.warnings", "heterotrain.telemetry.logs")
    ]
    assert [entry["level"] for entry in found] == ["warning", "warning", "error", "critical"]
    where = {"worker": "local", "local_rank": 0, "rank": 0, "formation": "1.0", "epoch": 0, "step": 2}
    assert all(where.items() <= entry.items() for entry in found)
    assert found[0]["event"] == "two\nlines"
    assert "of a library" in found[1]["event"]
    assert "ZeroDivisionError" in found[2]["exception"]
    assert "at the end" in found[3]["event"]
    assert "Traceback" in found[3]["exception"]


def test_text_for_people(zygote: Zygote, tmp_path: Path) -> None:
    """Time, rank and progress come first; a traceback looks as Python prints it."""
    lines = lines_of(zygote, tmp_path, "text")
    line = next(line for line in lines if line.endswith("two"))
    assert line.partition(" [")[2] == "local/0 rank 0 epoch 0 step 2] WARNING two"
    assert lines[-1] == "KeyError: 'at the end'"


def test_an_unknown_format_is_refused() -> None:
    """The message names the variable, its value and the allowed values."""
    with pytest.raises(UsageError, match=r"HETEROTRAIN_LOG_FORMAT.*text or json.*'yaml'"):
        set_up_logs({}, environ={env.LOG_FORMAT: "yaml"})
