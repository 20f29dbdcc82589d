"""Processors that a container's limit leaves to a rank."""

import math
from pathlib import Path

import pytest
import torch
from heterotrain.parts.planned.processors import usable_processors

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({"cpu.max": "5600 10000\n"}, 0.56),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu.max": "nothing that a kernel writes"}, math.inf),
        ({}, math.inf),
    ],
)
def test_the_kernel_s_limit_is_divided_among_the_ranks(
    tmp_path: Path, files: dict[str, str], processors: float
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_processors(CPU, ranks=1, groups=tmp_path) == processors
    assert usable_processors(CPU, ranks=4, groups=tmp_path) == processors / 4
    assert usable_processors(torch.device("cuda"), ranks=1, groups=tmp_path) == math.inf
