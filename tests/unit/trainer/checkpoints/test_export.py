"""``heterotrain export``: the weights of a checkpoint in a plain torch module, bit by bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import heterotrain
import pytest
import torch
from click.testing import Result
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.state.tensors import flatten
from heterotrain_cli.main import main
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from support.checkpoints import write
from support.cli_runner import CliRunner

DATA = torch.utils.data.TensorDataset(torch.randint(0, 7, (24,), generator=torch.Generator().manual_seed(0)))


class Tied(torch.nn.Module):
    """Embedding and output share their weights, and a running count is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.out = torch.nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.out(torch.tanh(self.embed(x)))  # type: ignore[no-any-return]  # torch leaves it untyped


pytestmark = pytest.mark.usefixtures("own_process")


def trained(folder: Path, *, epochs: int = 2) -> torch.nn.Module:
    """Train with a checkpoint after each step, all of which are kept; return the model."""
    job = heterotrain.init(batch_samples=8, epochs=epochs, checkpoint_uri=folder)
    torch.manual_seed(4)
    model = job.wrap(Tied())
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in job.steps(DATA):
        with step:
            for (x,) in step.micro_batches():
                step.backward(torch.nn.functional.cross_entropy(model(x), x))
            step.apply(optimizer)
    return model


def export(*arguments: str | Path) -> Result:
    """Run the command."""
    return CliRunner().invoke(main, ["export", *map(str, arguments)], catch_exceptions=False)


def test_a_plain_module_gets_the_trained_weights(tmp_path: Path) -> None:
    """Tied weights are in the file once and tied again after loading; the command tells step and epoch."""
    model, out = trained(tmp_path / "checkpoints"), tmp_path / "weights.safetensors"
    done = export(tmp_path / "checkpoints", out)
    assert done.exit_code == 0, done.output
    assert "step 6, epoch 2; 2 tensors" in done.stdout
    assert sorted(load_file(out)) == ["embed.weight", "seen"]
    with safe_open(out, "pt") as file:
        about = file.metadata()
    assert (about["heterotrain.step"], about["heterotrain.tied.out.weight"]) == ("6", "embed.weight")
    torch.manual_seed(9)
    plain = Tied()
    load_model(plain, out)
    assert plain.out.weight is plain.embed.weight
    assert int(plain.seen) == 48
    torch.testing.assert_close(plain.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_file_that_cannot_be_written_is_refused_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    unknown = export(tmp_path / "checkpoints", tmp_path / "weights.bin")
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "weights.bin has no known format: end it with one of .safetensors, .pt, .pth, .pt2, .onnx" in unknown.stderr
    missing = export(tmp_path / "checkpoints", tmp_path / "nowhere/weights.safetensors")
    assert missing.exit_code == 2
    assert f"weights.safetensors cannot be written: there is no folder {tmp_path / 'nowhere'}" in missing.stderr


def test_tied_weights_are_one_tensor_of_the_state() -> None:
    """They are sent and stored once, too; equal weights that are not tied stay apart."""
    model = torch.nn.ModuleDict({"tied": Tied(), "one": torch.nn.Linear(2, 2), "same": torch.nn.Linear(2, 2)})
    model["same"].load_state_dict(model["one"].state_dict())
    assert len(model.state_dict()) == 7
    assert len(flatten({"model": model.state_dict()}).tensors) == 6


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    """It is replaced on request only."""
    trained(tmp_path / "checkpoints", epochs=1)
    out = tmp_path / "weights.safetensors"
    out.write_text("precious")
    done = export(tmp_path / "checkpoints", out)
    assert (done.exit_code, out.read_text()) == (2, "precious")
    assert "--overwrite" in done.stderr
    assert export(tmp_path / "checkpoints", out, "--overwrite").exit_code == 0
    assert sorted(load_file(out)) == ["embed.weight", "seen"]


def shorten(folder: Path) -> None:
    """Tear a part."""
    part = next(folder.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-3])


def change(folder: Path) -> None:
    """Change one byte of a part."""
    part = next(folder.glob("*.safetensors"))
    part.write_bytes(b"\x01" + part.read_bytes()[1:])


def empty_manifest(folder: Path) -> None:
    """Tear the manifest."""
    next(folder.glob("checkpoint-*.json")).write_text("{")


def without_model(folder: Path) -> None:
    """Put a state without a model in its place."""
    for file in folder.iterdir():
        file.unlink()
    write(CheckpointFolder(folder, max_to_keep=1), flatten({"progress": {}}), step=3)


@pytest.mark.parametrize("damage", [shorten, change, empty_manifest, without_model])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """One sentence, no file, and no silent fall-back to an older checkpoint."""
    folder, out = tmp_path / "checkpoints", tmp_path / "weights.safetensors"
    trained(folder, epochs=1)
    older = json.loads(next(folder.glob("checkpoint-*.json")).read_text()) | {"step": 1}
    damage(folder)
    (folder / "checkpoint-g000000001-s000000000001-00000000000a.json").write_text(json.dumps(older))
    done = export(folder, out)
    assert done.exit_code == 2
    assert "damaged" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_missing_checkpoints_are_named(tmp_path: Path) -> None:
    """The message lists the steps that there are."""
    trained(tmp_path / "checkpoints", epochs=1)
    done = export(tmp_path / "checkpoints", tmp_path / "w.safetensors", "--step", "7")
    assert done.exit_code == 2
    assert "has no checkpoint of step 7: choose one of the steps [3]" in done.stderr
    assert (
        "holds no checkpoint: name a job's own folder"
        in export(tmp_path / "elsewhere", tmp_path / "w.safetensors").stderr
    )


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line can be installed without PyTorch and safetensors."""
    monkeypatch.delitem(sys.modules, "heterotrain.checkpoints.export", raising=False)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    done = export(tmp_path, tmp_path / "w.safetensors")
    assert done.exit_code == 2
    assert "needs the package safetensors.torch: pip install 'heterotrain[cli,export]'" in done.stderr
