"""``heterotrain export`` of whole models (.pt2, .onnx), from a real training."""

from __future__ import annotations

import signal
from pathlib import Path

import heterotrain
import pytest
import torch
from click.testing import Result
from heterotrain.checkpoints.export_program import read_inputs
from heterotrain.errors import UsageError
from heterotrain_cli.main import main
from support.cli_runner import CliRunner

SCRIPT = """
import torch

def network(width):
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU(), torch.nn.Dropout(0.5),
        torch.nn.Flatten(), torch.nn.Linear(width * 16, 3),
    )

def number():
    return 7
"""
MODEL = ["--arguments", '{"width": 4}', "--input", "[2,1,4,4]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script and the checkpoints of its training."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "train.py").write_text(SCRIPT)
    names: dict[str, object] = {}
    exec(compile(SCRIPT, "train.py", "exec"), names)  # noqa: S102  # the script above
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heterotrain.termination_message.TerminationMessage.install", lambda _self: None)
        job = heterotrain.init(batch_samples=8, epochs=2, seed=5, checkpoint_uri=folder / "checkpoints")
        model = job.wrap(names["network"](4))  # type: ignore[operator]  # a function
        optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        data = torch.utils.data.TensorDataset(torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(0)))
        for step in job.steps(data):
            with step:
                for (x,) in step.micro_batches():
                    step.backward(model(x).pow(2).mean())
                step.apply(optimizer)
    signal.signal(signal.SIGTERM, before)
    return folder


def export(folder: Path, out: Path, *more: str) -> Result:
    script = [] if not more else ["--model", f"{folder / 'train.py'}:network"]
    arguments = ["export", str(folder / "checkpoints"), str(out), *script, *more]
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_a_program_runs_without_the_script_for_any_batch(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "digits.pt2"
    done = export(trained, out, *MODEL)
    assert done.exit_code == 0, done.output
    assert "differ from the script's model by at most 0.0e+00" in done.stdout
    program = torch.export.load(out).module()
    x = torch.randn(5, 1, 4, 4)
    assert program(x).shape == (5, 3)
    assert torch.equal(program(x), program(x)), "dropout is off"
    assert {path.name for path in tmp_path.iterdir()} == {"digits.pt2"}


def test_onnx_agrees_with_the_model(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="make test-all PART=wheel checks it")
    pytest.importorskip("onnxscript", reason="make test-all PART=wheel checks it")
    out = tmp_path / "digits.onnx"
    done = export(trained, out, *MODEL)
    assert done.exit_code == 0, done.output
    assert out.exists()


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("m.pt2", [], "needs --model and --input"),
        ("m.safetensors", MODEL, "needs neither --model nor --input"),
        ("m.pt2", ["--input", "2x4"], "is not a type and a shape"),
        ("m.pt2", ["--model", "train.py:missing", "--input", "[2,1,4,4]"], "does not make a model"),
        ("m.pt2", ["--model", "train.py:number", "--input", "[2,1,4,4]"], "returns int, not a torch.nn.Module"),
        ("m.pt2", ["--arguments", '{"width": 5}', "--input", "[2,1,4,4]"], "the weights do not fit"),
        ("m.pt2", ["--arguments", "4", "--input", "[2,1,4,4]"], "is not a JSON object"),
        ("m.pt2", ["--arguments", '{"width": 4}', "--input", "[2,2,4,4]"], "cannot be exported to .pt2"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_file(  # noqa: PLR0917  # pytest's arguments
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: list[str], said: str
) -> None:
    monkeypatch.chdir(trained)
    done = export(trained, tmp_path / name, *more)
    assert done.exit_code == 2
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_types_of_inputs() -> None:
    one, other = read_inputs(["float16[2,3]", "int64[4]"])
    assert (one.dtype, tuple(one.shape), other.dtype) == (torch.float16, (2, 3), torch.int64)
    with pytest.raises(UsageError, match="is not a type and a shape"):
        read_inputs(["torch[2]"])
