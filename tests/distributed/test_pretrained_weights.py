"""Jobs that begin with weights out of files: the same training in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.harness import Operator
from distributed.pipeline_job_scripts import Decoder
from distributed.test_pipeline_jobs import BATCH, BLOCKS, SCRIPT, check_evaluations, reference, started
from distributed.test_sharded_jobs import plan_pods, start_pods
from safetensors.torch import save_file


@pytest.mark.parametrize("mode", ["Data", "Sharded", "Pipeline"])
def test_every_layout_trains_from_the_same_files_like_one_process(
    operate: Callable[..., Operator], tmp_path: Path, mode: str
) -> None:
    torch.manual_seed(11)  # other values than the layers draw
    state = {name: tensor.clone() for name, tensor in Decoder(BLOCKS).double().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    operator = operate(batch_samples=BATCH, epochs=1, parallelism=mode)
    options = {"weights": str(tmp_path)}
    if mode == "Sharded":
        (ranks,) = start_pods(operator, 2, script=SCRIPT, options=options)
        plan_pods(operator, [ranks], [BATCH])
    else:
        cuts = (3,) if mode == "Pipeline" else ()
        ranks = started(operator, len(cuts) + 1, options=options)
        operator.plan_members([(ranks, cuts, BATCH, 4)])
    operator.finish(ranks)
    weights, evaluated = reference(epochs=1, state=state)
    seen = dict.fromkeys(weights, 0)
    for rank, worker in enumerate(ranks):
        assert worker.code == 0, operator.evidence()
        number = rank if mode == "Sharded" else 0
        found = torch.load(operator.folder / f"{worker.name}-{number}.pt", weights_only=True)
        check_evaluations(found["found"], evaluated)
        for name, part in found["parts"].items():
            first, stop = found["places"][name]
            seen[name] += stop - first
            torch.testing.assert_close(
                part.reshape(-1), weights[name].reshape(-1)[first:stop], rtol=1e-10, atol=1e-10
            )  # fmt: skip
    assert all(seen[name] >= tensor.numel() for name, tensor in weights.items()), "together they hold the model"
