"""Every example in a small form gives the same result in each of the three ways to run it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import LIMIT_S, ROOT, START_S, Operator, Zygote
from support.ports import free_port
from support.repeat import part_of

SCRIPT = "distributed.data_scripts:example"
EPOCHS, BATCH = 2, 64
SMALL = {
    "digits": ["--samples-per-epoch", "640", "--width", "4", "--learning-rate", "0.01"],
    "lora": ["--base", "{folder}/base.pt", "--width", "64"],
    "language-model": ["--files", "12", "--width", "16", "--blocks", "2", "--learning-rate", "0.01"],
    "tabular": [],
    "text": ["--topics", "6", "--width", "16", "--layers", "1", "--learning-rate", "0.01"],
}


def arguments(name: str, folder: Path = ROOT) -> dict[str, object]:
    """Return the example's arguments, including the epochs and the batch for runs without an operator."""
    path = str(ROOT / "deploy/examples" / name / "train.py")
    own = [each.replace("{folder}", str(folder)) for each in SMALL[name]]
    return {"path": path, "arguments": [*own, "--epochs", str(EPOCHS), "--batch", str(BATCH)]}


def started(
    zygote: Zygote, folder: Path, command: dict[str, object], ranks: int, *, launcher: bool = False
) -> list[str]:
    """Run one process as on a laptop, or several as under torchrun; return their outputs.

    Args:
        zygote: starts them.
        folder: for outputs.
        command: the script's path and arguments.
        ranks: number of processes.
        launcher: whether a single process, too, is started as by torchrun.
    """
    port, inboxes, outputs = free_port(), [], []
    for rank in range(ranks):
        environ = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        output = folder / f"output-{ranks}-{rank}-{len(list(folder.iterdir()))}"
        request = {
            "environ": environ if ranks > 1 or launcher else {}, "output": str(output), "script": SCRIPT,
            "arguments": {"out": str(folder), **command},
        }  # fmt: skip
        inboxes.append(zygote.start(str(output), request))
        outputs.append(output)
    for inbox, output in zip(inboxes, outputs, strict=True):
        assert "pid" in inbox.get(timeout=START_S)
        assert inbox.get(timeout=LIMIT_S)["code"] == 0, output.read_text()
    return [output.read_text() for output in outputs]


def result(outputs: list[str]) -> float:
    """Return the result of the last epoch's evaluation, which only one rank logs."""
    line = rf"epoch {EPOCHS - 1} done \({EPOCHS} of {EPOCHS}\): (?:accuracy|bits_per_letter|bits_per_byte) (\S+)"
    found = [re.findall(line, output) for output in outputs]
    (value,) = [values[-1] for values in found if values]
    return float(value)


@pytest.mark.parametrize("name", part_of(sorted(SMALL), of=3))
def test_an_example_alone_under_torchrun_and_as_a_job(
    zygote: Zygote, operate: Callable[..., Operator], tmp_path: Path, name: str
) -> None:
    """The result is the same for any division of the work, except for dropout's random numbers."""
    operator = operate(epochs=EPOCHS, batch_samples=BATCH, bucket_mib=25.0)
    workers = [operator.start(f"w{i}", script=SCRIPT, **arguments(name, tmp_path)) for i in range(2)]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(44, 20), micro=(16, 0))
    alone, torchrun = (result(started(zygote, tmp_path, arguments(name, tmp_path), ranks)) for ranks in (1, 2))
    operator.finish(workers)
    assert [worker.code for worker in workers] == [0, 0], operator.evidence()
    job = result([worker.log() for worker in workers])
    assert abs(torchrun - alone) < 0.02 * (1 + alone)
    assert abs(job - alone) < 0.02 * (1 + alone)


@pytest.fixture(scope="module")
def of_one_process(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The language model's result in one process."""
    return result(started(zygote, tmp_path_factory.mktemp("alone"), arguments("language-model"), 1))


@pytest.mark.parametrize(("parallelism", "ranks"), part_of([("pipeline", 3), ("pipeline", 1), ("sharded", 2)], of=3))
def test_the_language_model_is_divided_under_torchrun(
    zygote: Zygote, tmp_path: Path, of_one_process: float, parallelism: str, ranks: int
) -> None:
    """The same script, without an operator; only dropout draws other numbers."""
    command = arguments("language-model")
    divided = {**command, "arguments": [*arguments("language-model")["arguments"], "--parallelism", parallelism]}  # type: ignore[misc]  # a TypedDict with another list
    found = result(started(zygote, tmp_path, divided, ranks))
    assert abs(found - of_one_process) < 0.02 * (1 + of_one_process)


def test_every_example_is_tested() -> None:
    """A new folder needs a small form here; the script for torchrun has tests of its own, as have those of guides."""
    folders = sorted(path.parent.name for path in (ROOT / "deploy/examples").glob("*/train.py"))
    assert folders == sorted([*SMALL, "torchrun"])


@pytest.mark.parametrize(("name", "ranks_before"), part_of([("language", (1, 2)), ("vision", (1,))], of=2))
def test_a_research_script_and_its_port_end_with_the_same_loss(
    zygote: Zygote, tmp_path: Path, name: str, ranks_before: tuple[int, ...]
) -> None:
    """BatchNorm of the vision script's DDP sees a part of the batch only, so it is compared on one rank."""
    folder, losses = ROOT / "deploy/examples" / f"from-ddp-{name}", []
    for script, ranks in (*(("before.py", ranks) for ranks in ranks_before), ("after.py", 1), ("after.py", 2)):
        command = {"path": str(folder / script), "arguments": []}
        outputs = started(zygote, tmp_path, command, ranks)
        found = [each for output in outputs for each in re.findall(r"^loss (\S+)$", output, re.MULTILINE)]
        losses.append(float(found[-1]))
    assert max(losses) - min(losses) <= 1e-4
    before, after = ((folder / script).read_text().splitlines() for script in ("before.py", "after.py"))
    changes = [line[0] for line in difflib.unified_diff(before, after, n=0) if line[:3] not in {"---", "+++"}]
    size = f"+{changes.count('+')} −{changes.count('-')}"
    assert f"| `from-ddp-{name}` | {size} |" in (ROOT / "docs/other-libraries.md").read_text(), size


def test_the_script_for_ddp_and_its_port_end_with_the_same_loss(zygote: Zygote, tmp_path: Path) -> None:
    """Alone and on two ranks, and the port has at most ten lines that know of heterotrain."""
    folder, losses = ROOT / "deploy/examples/from-ddp", []
    for script, ranks in (("before.py", 1), ("before.py", 2), ("after.py", 1), ("after.py", 2)):
        command = {"path": str(folder / script), "arguments": []}
        outputs = started(zygote, tmp_path, command, ranks, launcher=script == "before.py")
        losses += [float(found) for output in outputs for found in re.findall(r"^loss (\S+)$", output, re.MULTILINE)]
    assert len(losses) == 6
    assert max(losses) - min(losses) <= 2e-6
    assert losses[0] < 0.1, "nothing was learned"
    lines = (folder / "after.py").read_text().splitlines()
    own = [line for line in lines if re.search(r"\bheterotrain\b|\bjob\.|\bstep\b", line) and '"""' not in line]
    assert len(own) <= 10
    assert len(lines) < len((folder / "before.py").read_text().splitlines())


README_SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import heterotrain

def Net():
    torch.manual_seed(1)
    return torch.nn.Linear(4, 1)

loss_fn = torch.nn.functional.mse_loss
device, world, epochs, batch = torch.device("cpu"), {ranks}, 2, 16
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
{block}
print("weights", *(round(float(value), 6) for part in model.parameters() for value in part.flatten()))
"""


def test_both_columns_of_the_readme_end_with_the_same_weights(zygote: Zygote, tmp_path: Path) -> None:
    """The blocks as they are, with a small network and data, alone and on two ranks."""
    before, after = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    found = set()
    for name, block, ranks in (("before", before, 1), ("before", before, 2), ("after", after, 1), ("after", after, 2)):
        script = tmp_path / f"{name}-{ranks}.py"
        script.write_text(README_SCRIPT.format(block=block, ranks=ranks))
        outputs = started(zygote, tmp_path, {"path": str(script), "arguments": []}, ranks, launcher=name == "before")
        found |= {line for output in outputs for line in output.splitlines() if line.startswith("weights ")}
    values = [[float(word) for word in line.split()[1:]] for line in found]
    assert len(values[0]) == 5
    assert all(abs(a - b) <= 2e-6 for column in zip(*values, strict=True) for a in column for b in column)
