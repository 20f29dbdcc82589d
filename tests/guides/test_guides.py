"""The scripts of the guides before and after: the same loss, alone and on two ranks. The libraries are test extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests/guides/stand_ins"
"""What AdaptDL imports and recent versions of setuptools lack."""
LIBRARY = {
    "from-accelerate": "accelerate",
    "from-adaptdl": "adaptdl",
    "from-hugging-face-trainer": "transformers",
    "from-lightning": "pytorch_lightning",
}
GUIDES = sorted(LIBRARY)
RANKS_BEFORE = {"from-adaptdl": (1,)}
"""AdaptDL's processes are started by its own scheduler, not by torchrun."""
MOST_OWN_LINES = 10


def losses(path: Path, ranks: int, folder: Path) -> list[float]:
    """Run a script, with torchrun if it has several ranks, and return the losses that it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    sources = [str(ROOT / "core"), str(ROOT / "trainer"), str(STAND_INS)]
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [*sources, *own])), "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *torchrun, str(path)], cwd=folder, env=environ, capture_output=True, text=True, check=False,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [float(found) for found in re.findall(r"loss (\d\.\d{6})", done.stdout)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("guide", GUIDES)
def test_both_scripts_end_with_the_same_loss(tmp_path: Path, guide: str) -> None:
    if find_spec(LIBRARY[guide]) is None:
        pytest.skip(reason="make test-all PART=guides installs it")
    folder, before = ROOT / "deploy/examples" / guide, RANKS_BEFORE.get(guide, (1, 2))
    runs = [*(("before.py", ranks) for ranks in before), ("after.py", 1), ("after.py", 2)]
    found = [losses(folder / script, ranks, tmp_path) for script, ranks in runs]
    assert [len(each) for each in found] == [*before, 1, 2]
    every = [loss for each in found for loss in each]
    assert max(every) - min(every) <= 2e-6, every
    assert every[0] < 0.1, "nothing was learned"


@pytest.mark.parametrize("guide", GUIDES)
def test_the_port_has_few_lines_that_know_heterotrain(guide: str) -> None:
    lines = (ROOT / "deploy/examples" / guide / "after.py").read_text().splitlines()
    own = [line for line in lines if re.search(r"\bheterotrain\b|\bjob\.|\bstep\b", line) and '"""' not in line]
    assert 0 < len(own) <= MOST_OWN_LINES


def test_every_guide_is_tested_and_documented() -> None:
    """Those for DistributedDataParallel need no library and are tested with the examples."""
    folders = {path.parent.name for path in (ROOT / "deploy/examples").glob("*/before.py")}
    assert folders == {"from-ddp", "from-ddp-language", "from-ddp-vision", *GUIDES}
    text = (ROOT / "docs/other-libraries.md").read_text()
    assert [name for name in folders if name not in text] == []
