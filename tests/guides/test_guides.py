"""The scripts of the guides before and after: the same loss, alone and on two ranks. The libraries are test extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = {
    "from-accelerate": "accelerate",
    "from-hugging-face-trainer": "transformers",
    "from-lightning": "pytorch_lightning",
}
MOST_OWN_LINES = 10


def losses(path: Path, ranks: int, folder: Path) -> list[float]:
    """Run a script, with torchrun if it has several ranks, and return the losses that it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    sources = [str(ROOT / part) for part in ("core", "trainer")]
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
@pytest.mark.parametrize("guide", sorted(LIBRARY))
def test_both_scripts_end_with_the_same_loss(tmp_path: Path, guide: str) -> None:
    pytest.importorskip(LIBRARY[guide], reason="make test-guides installs it")
    folder = ROOT / "deploy/examples" / guide
    found = [losses(folder / script, ranks, tmp_path) for script in ("before.py", "after.py") for ranks in (1, 2)]
    assert [len(each) for each in found] == [1, 2, 1, 2]
    every = [loss for each in found for loss in each]
    assert max(every) - min(every) <= 2e-6, every
    assert every[0] < 0.1, "nothing was learned"


@pytest.mark.parametrize("guide", sorted(LIBRARY))
def test_the_port_has_few_lines_that_know_heterotrain(guide: str) -> None:
    lines = (ROOT / "deploy/examples" / guide / "after.py").read_text().splitlines()
    own = [line for line in lines if re.search(r"\bheterotrain\b|\bjob\.|\bstep\b", line) and '"""' not in line]
    assert 0 < len(own) <= MOST_OWN_LINES


def test_every_guide_is_tested_and_documented() -> None:
    """Those for DistributedDataParallel need no library and are tested with the examples."""
    folders = {path.parent.name for path in (ROOT / "deploy/examples").glob("*/before.py")}
    assert folders == {"from-ddp", "from-ddp-language", "from-ddp-vision", *LIBRARY}
    text = "".join((ROOT / "docs" / name).read_text() for name in ("from-ddp.md", "other-libraries.md"))
    assert [name for name in folders if name not in text] == []
