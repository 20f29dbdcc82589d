"""``heterotrain bench`` on a real script: a table for one and two workers, and a profile that the forecast reads."""

from __future__ import annotations

import json
from pathlib import Path

from heterotrain_cli.main import main
from support.cli_runner import CliRunner

SCRIPT = """
import heterotrain, time, torch
torch.set_num_threads(1)
job = heterotrain.init(epochs=1, batch_samples=7, checkpoint_uri="never-written")
model = job.wrap(torch.nn.Linear(64, 64))
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
for step in job.steps(torch.utils.data.TensorDataset(torch.ones(4096, 64))):
    with step:
        for (x,) in step.micro_batches():
            time.sleep(0.0003 * len(x))  # other work on the machine hardly changes this
            step.backward(model(x).pow(2).mean())
        step.apply(optimizer)
"""


def test_a_script_is_measured_with_one_and_two_workers(tmp_path: Path) -> None:
    script, output = tmp_path / "train.py", tmp_path / "bench"
    script.write_text(SCRIPT)
    options = ["--batch", "32", "--workers", "1,2", "--seconds", "0.5", "--timeout", "300", "--pool", "a100"]
    done = CliRunner().invoke(main, ["bench", str(script), *options, "--folder", str(output)])
    assert done.exit_code == 0, done.output
    found = json.loads((output / "bench.json").read_text())
    assert [(row["workers"], row["batchSamples"]) for row in found["rows"]] == [(1, 32), (2, 32)]
    assert all(row["samplesPerSecond"] > 0 for row in found["rows"])
    assert found["environment"]["versions"]["torch"]
    assert (output / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "never-written").exists(), "the script's own settings are replaced"
    if "no profile: " in done.output:  # steps did not grow with their samples: the machine is too busy for a profile
        assert not (output / "profile.yaml").exists()
        return
    done = CliRunner().invoke(main, ["forecast", "--profile", str(output / "profile.yaml"), "--batch", "32"])
    assert done.exit_code == 0, done.output
    assert "a100" in done.output
