"""The script of `make bench-noise`: each pool takes a fixed time per sample, and one pool's steps vary at random.

The time passes in a sleep, so it does not depend on what else the machine does. The script runs in a pod together with
the digits example's own script (`train.py`), whose pictures it uses.
"""

import argparse
import os
import time

import heterotrain
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name
from train import Augmented, load_digits


def main():
    """Train; nothing depends on the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples-per-epoch", type=int, required=True)
    parser.add_argument("--milliseconds", nargs="+", required=True, metavar="POOL=MS", help="per sample")
    parser.add_argument("--noisy", required=True, help="the pool whose steps vary")
    parser.add_argument("--variation", type=float, required=True, help="standard deviation of its steps, relative")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pool = os.environ["POOL"]
    sample_s = {name: float(ms) / 1000 for name, _, ms in (each.partition("=") for each in options.milliseconds)}[pool]
    sigma = np.sqrt(np.log(1 + options.variation**2)) if pool == options.noisy else 0.0  # of a lognormal of mean 1
    draw = np.random.default_rng(0)

    job = heterotrain.init()
    model = job.wrap(nn.Sequential(nn.Flatten(), nn.Linear(256, 10)))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in job.steps(Augmented(*load_digits(), options.samples_per_epoch)):
        with step:
            factor = draw.lognormal(-(sigma**2) / 2, sigma)
            for x, y in step.micro_batches():
                time.sleep(len(x) * sample_s * factor)
                step.backward(F.cross_entropy(model(x), y))
            step.apply(optimizer)


if __name__ == "__main__":
    main()
