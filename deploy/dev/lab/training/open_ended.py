"""An open-ended digits example: training ends soon after a file appears.

It serves tests of unknown duration, such as a worker that moves to another job and comes back. The script runs in a pod
together with the digits example's own script (`train.py`), whose data and network it uses.

With `--sample-seconds` it waits for each sample as for a device, so that a job that only has to go on takes few
processor seconds. Its steps are real all the same: samples, gradients, votes and commits.
"""

import argparse
import os
import time
from pathlib import Path

import heterotrain
import torch
from torch.nn import functional as F  # noqa: N812  # the usual name
from train import Augmented, load_digits, network


def main():
    """Train until one step after the epoch in which the file appears; the leader checks and informs all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples-per-epoch", type=int, required=True)
    parser.add_argument("--until", type=Path, required=True, help="file whose appearance ends the training")
    parser.add_argument("--width", type=int, default=44, help="channels of the first layer")
    pace = float(os.environ.get("SAMPLE_SECONDS", "0"))
    parser.add_argument("--sample-seconds", type=float, default=pace, help="wait for each sample [$SAMPLE_SECONDS]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    job = heterotrain.init()
    model = job.wrap(network(options.width))
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.002))

    @job.on_epoch_end
    def look(_epoch):
        if job.sum(enough=int(job.is_leader and options.until.exists()))["enough"]:
            job.finish(f"{options.until} is there")

    for step in job.steps(Augmented(*load_digits(), options.samples_per_epoch)):
        with step:
            for x, y in step.micro_batches():
                time.sleep(options.sample_seconds * len(x))
                step.backward(F.cross_entropy(model(x), y))
            step.apply(optimizer)


if __name__ == "__main__":
    main()
