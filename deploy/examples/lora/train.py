"""Adapt a trained model to other data by low-rank matrices (LoRA), and train and save nothing but these.

    python train.py --base base.pt                    trains a base on upright digits, and adapts it to turned ones
    torchrun --nproc-per-node 2 train.py --base base.pt

The base is trained once, by one process, and read by every later run; a real one comes from elsewhere. In a job,
``--base`` is on a volume that all workers share.
"""

import argparse
import fcntl
import gzip
import importlib.util
import math
from pathlib import Path

import heterotrain
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name

TEST_IMAGES = 297


class LowRank(nn.Module):
    """A frozen linear layer, and a product of two thin matrices that learns the difference; it begins with none."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(requires_grad=False), alpha / rank
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x):
        """Return the base's output and the learned difference."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up) * self.scale

    def merged(self):
        """Return one ordinary layer that computes the same."""
        self.base.weight.data += self.scale * self.up.data @ self.down.data
        return self.base


def adapt(model, rank, alpha=16.0):
    """Freeze the model, and put a low-rank layer around each of its linear ones."""
    model.requires_grad_(requires_grad=False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, LowRank(layer, rank, alpha))
    return model


def load_digits():
    """Return scikit-learn's 1,797 digits as images of 64 pixels in [0, 1], and labels."""
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    with gzip.open(package / "datasets/data/digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return torch.from_numpy(rows[:, :64]) / 16, torch.from_numpy(rows[:, 64]).long()


def network(width):
    """Return the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))


def base_of(path, width, x, y):
    """Return the weights of the base model; one process of each host trains it, and the others wait for the file."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            model = network(width)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
            for _ in range(150):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            torch.save(model.state_dict(), path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
    return torch.load(path)


def main():
    """Train the adapters, and report the accuracy on turned digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="file of the base model's weights")
    parser.add_argument("--adapters", type=Path, help="file for the trained adapters")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=8, help="epochs, without an operator")
    parser.add_argument("--batch", type=int, default=100, help="global batch, without an operator")
    options = parser.parse_args()
    torch.set_num_threads(1)

    x, y = load_digits()
    base = base_of(options.base, options.width, x[:-TEST_IMAGES], y[:-TEST_IMAGES])
    turned = x.view(-1, 8, 8).transpose(1, 2).flip(2).reshape(-1, 64)
    train_set = torch.utils.data.TensorDataset(turned[:-TEST_IMAGES], y[:-TEST_IMAGES])
    test_set = torch.utils.data.TensorDataset(turned[-TEST_IMAGES:], y[-TEST_IMAGES:])

    job = heterotrain.init(epochs=options.epochs, batch_samples=options.batch)
    model = network(options.width)
    model.load_state_dict(base)
    model = job.wrap(adapt(model, options.rank))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = job.optimizer(torch.optim.AdamW(trained.values(), lr=0.005, weight_decay=0.0))

    @job.on_epoch_end
    def evaluate(_epoch):
        return job.evaluate(test_set, lambda output, y: {"accuracy": (output.argmax(1) == y).float().mean()})

    for step in job.steps(train_set):
        with step:
            for images, labels in step.micro_batches():
                step.backward(F.cross_entropy(model(images), labels))
            step.apply(optimizer, clip_norm=1.0)

    if job.is_leader and options.adapters:
        torch.save({name: p.detach().cpu() for name, p in trained.items()}, options.adapters)
        sizes = [sum(p.numel() for p in group) for group in (trained.values(), model.parameters())]
        print(f"{sizes[0]} of {sizes[1]} parameters were trained, and are in {options.adapters}")


if __name__ == "__main__":
    main()
