"""A small training in double precision whose evaluation fails while a file exists, as by a mistake that is corrected.

It serves tests of what a failed job continues with: its weights are compared with those of a run without a mistake.
"""

import argparse
import os
import time
from pathlib import Path

import heterotrain
import torch
from torch import nn


def main():
    """Train; the evaluation of the second epoch raises while the file exists."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples-per-epoch", type=int, required=True)
    options, _ = parser.parse_known_args()
    flaw, pace = Path("/checkpoints/flaw"), float(os.environ.get("SAMPLE_SECONDS", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(0)

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(options.samples_per_epoch, 8, generator=draw, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, (x.sum(1, keepdim=True)).sin())
    job = heterotrain.init()
    model = job.wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @job.on_epoch_end
    def evaluate(epoch):
        if epoch == 1 and flaw.exists():
            raise RuntimeError("the evaluation divides by an empty set")

    for step in job.steps(data):
        with step:
            for inputs, targets in step.micro_batches():
                time.sleep(pace * len(inputs))
                step.backward(((model(inputs) - targets) ** 2).mean())
            step.apply(optimizer)


if __name__ == "__main__":
    main()
