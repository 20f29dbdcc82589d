"""Train a small convolutional network on handwritten digits, with any number of unequal workers.

The lines marked with an arrow are all that heterotrain adds to an ordinary PyTorch loop. Run it anywhere:

    python train.py --epochs 2          one process on a laptop
    torchrun --nproc-per-node 2 train.py
    kubectl apply -f job.yaml           on a cluster with the operator
"""

import argparse
import gzip
import importlib.util
from pathlib import Path

import heterotrain
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name

TEST_IMAGES = 297


def load_digits():
    """Return scikit-learn's 1,797 digits as images in [0, 1] and labels, read from a file in the package.

    Importing scikit-learn would take longer than training an epoch on a slow worker.
    """
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    with gzip.open(package / "datasets/data/digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    images = torch.from_numpy(rows[:, :64]).reshape(-1, 1, 8, 8) / 16
    return F.interpolate(images, size=16, mode="bilinear"), torch.from_numpy(rows[:, 64]).long()


class Augmented(torch.utils.data.Dataset):
    """Shifted, rotated and scaled digits; sample i is always the same image, so that every run has the same data."""

    def __init__(self, images, labels, samples):
        self.images, self.labels, self.samples = images, labels, samples
        draw = torch.Generator().manual_seed(1)
        self.angle = (torch.rand(samples, generator=draw) - 0.5) * 0.6
        self.scale = 1 + (torch.rand(samples, generator=draw) - 0.5) * 0.3
        self.shift = (torch.rand(samples, 2, generator=draw) - 0.5) * 0.3

    def __len__(self):
        return self.samples

    def __getitems__(self, indices):
        i = torch.as_tensor(indices)
        cos, sin = self.scale[i] * self.angle[i].cos(), self.scale[i] * self.angle[i].sin()
        matrix = torch.stack(
            [torch.stack([cos, -sin, self.shift[i, 0]], 1), torch.stack([sin, cos, self.shift[i, 1]], 1)], 1
        )
        source = self.images[i % len(self.images)]
        pictures = F.grid_sample(source, F.affine_grid(matrix, source.shape, align_corners=False), align_corners=False)
        return list(zip(pictures, self.labels[i % len(self.labels)], strict=True))


def network(width):
    """Return the network; ``width`` sets the computing time of a sample."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 16, 10),
    )  # fmt: skip


def main():
    """Train, and report the accuracy on a separate test set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples-per-epoch", type=int, default=13440)
    parser.add_argument("--width", type=int, default=44, help="channels of the first layer")
    parser.add_argument("--learning-rate", type=float, default=0.002)
    parser.add_argument("--epochs", type=int, default=5, help="epochs, without an operator")
    parser.add_argument("--batch", type=int, default=448, help="global batch, without an operator")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    images, labels = load_digits()
    train_set = Augmented(images[:-TEST_IMAGES], labels[:-TEST_IMAGES], options.samples_per_epoch)
    test_set = torch.utils.data.TensorDataset(images[-TEST_IMAGES:], labels[-TEST_IMAGES:])

    job = heterotrain.init(epochs=options.epochs, batch_samples=options.batch)  # <-
    model = job.wrap(network(options.width))  # <-
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=options.learning_rate))  # <-

    @job.on_epoch_end  # <-
    def evaluate(_epoch):
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in job.part(test_set, batch_samples=100))
        return {"accuracy": job.sum(right=right)["right"] / TEST_IMAGES}

    for step in job.steps(train_set):  # <-
        with step:  # <-
            for x, y in step.micro_batches():  # <-
                step.backward(F.cross_entropy(model(x), y))  # <-
            step.apply(optimizer)  # <-


if __name__ == "__main__":
    main()
