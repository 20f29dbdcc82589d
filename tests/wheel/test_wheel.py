"""The wheel in new environments, one for each extra: what users get from ``pip install``.

``make test-all PART=wheel`` runs it.

Each environment is installed twice: with the newest versions that the metadata allow, and with the lowest versions of
the packages that they name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from heterotrain_core.version import __version__
from support.wheels import built

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
PROFILE = "members: [{name: a100, count: 2, perSampleSeconds: 0.001, pricePerHour: 3.67}]"
SCRIPT = """
import heterotrain, torch
job = heterotrain.init(batch_samples=8, checkpoint_uri="checkpoints")
model = job.wrap(torch.nn.Linear(2, 1))
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in job.steps(torch.utils.data.TensorDataset(torch.ones(64, 2))):
    with step:
        for (x,) in step.micro_batches():
            step.backward(model(x).pow(2).mean())
        step.apply(optimizer)
print("trained")
"""
COMMANDS = {
    "": [["-c", "import heterotrain; print(heterotrain.__version__)"], ["heterotrain", "--help"]],
    "cli": [
        ["heterotrain", "forecast", "--profile", "profile.yaml", "--batch", "64"],
        ["kubectl-htj", "--help"],
        ["-c", "import heterotrain_client"],
    ],
    "operator": [["heterotrain-operator", "--help"], ["-m", "heterotrain_operator.api.crd"]],
    "trainer": [["train.py"], ["heterotrain-run", "train.py"], ["-m", "heterotrain.preflight"]],
    "cli,export": [["heterotrain", "export", "checkpoints", "weights.safetensors"]],
    "cli,onnx": [["heterotrain", "export", "checkpoints", "m.onnx", "--model", "model.py:network", "--input", "[2,2]"]],
    "trainer,tensorboard": [["train.py"]],
}
"""What has to work with each extra; names of programs, or arguments of Python."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


def test_every_extra_is_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() - {part for names in COMMANDS for part in names.split(",")} == set()


@pytest.mark.parametrize("lock", ["operator", "trainer", "trainer-cu12", "examples", "examples-cu12"])
def test_every_package_of_an_image_has_a_wheel_for_arm64(tmp_path: Path, lock: str) -> None:
    """Images are built for amd64 and arm64 from the same locks. This resolves and installs nothing."""
    done = subprocess.run(
        [
            UV, "pip", "install", "--dry-run", "--python", sys.executable, "--target", tmp_path, "--python-version",
            "3.11", "--python-platform", "aarch64-manylinux_2_28", "--only-binary", ":all:", "--require-hashes",
            "-r", ROOT / f"requirements/{lock}.txt",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Would install" in done.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"])
@pytest.mark.parametrize("extra", COMMANDS)
def test_an_extra_works_in_a_new_environment(wheel: Path, tmp_path: Path, extra: str, resolution: str) -> None:
    environment = tmp_path / "environment"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    wanted = f"heterotrain[{extra}] @ {wheel.as_uri()}" if extra else f"heterotrain @ {wheel.as_uri()}"
    install = [UV, "pip", "install", "--quiet", "--python", environment / "bin/python", "--resolution", resolution]
    done = subprocess.run([*install, wanted], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    (tmp_path / "model.py").write_text("import torch\ndef network(): return torch.nn.Linear(2, 1)")
    if {"export", "onnx"} & set(extra.split(",")):  # it reads a checkpoint of another environment, with the trainer
        own = {**environ, "PYTHONPATH": f"{ROOT / 'core'}:{ROOT / 'trainer'}"}
        subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=own, capture_output=True, check=True)
    for command in COMMANDS[extra]:
        program = environment / "bin" / command[0]
        line = [program, *command[1:]] if program.exists() else [environment / "bin/python", *command]
        ran = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=300)
        assert ran.returncode == 0, f"{command}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}"
    if extra == "cli":
        asked = subprocess.run(
            [environment / "bin/heterotrain", "init", "train.py"], input="my/training\na100=2\n512 20\n",
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert yaml.safe_load(asked.stdout)["kind"] == "HeteroTrainJob", asked.stdout
    version = subprocess.run(
        [environment / "bin/python", "-c", "import heterotrain; print(heterotrain.__version__)"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert version.stdout.strip() == __version__
