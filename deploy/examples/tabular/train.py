"""Train a small network to classify tumours by thirty measurements of cells, without a hand-written loop.

``heterotrain.fit`` is the whole training: model, data, loss, optimizer. Run it anywhere:

    python train.py                     one process on a laptop
    torchrun --nproc-per-node 2 train.py
    kubectl create configmap tabular-script --from-file train.py && kubectl apply -f job.yaml
"""

import argparse
import importlib.util
from pathlib import Path

import heterotrain
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name

TEST_ROWS = 114


def load_tumours():
    """Return scikit-learn's 569 tumours with standardised measurements, read from a file in the package.

    Importing scikit-learn would take longer than the whole training.
    """
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    rows = np.loadtxt(package / "datasets/data/breast_cancer.csv", delimiter=",", skiprows=1, dtype=np.float32)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    features, labels = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, -1])
    known = features[:-TEST_ROWS]
    return (features - known.mean(0)) / known.std(0), labels


def main():
    """Train, and report the accuracy on a separate test set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="epochs, without an operator")
    parser.add_argument("--batch", type=int, default=65, help="global batch, without an operator")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    features, labels = load_tumours()
    train_set = torch.utils.data.TensorDataset(features[:-TEST_ROWS], labels[:-TEST_ROWS])
    test_set = torch.utils.data.TensorDataset(features[-TEST_ROWS:], labels[-TEST_ROWS:])

    def loss(model, batch):
        x, y = batch
        return F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)

    def evaluation(job, model):
        def evaluate(_epoch):
            right = sum(
                int(((model(x).squeeze(1) > 0) == (y > 0)).sum()) for x, y in job.part(test_set, batch_samples=57)
            )
            return {"accuracy": job.sum(right=right)["right"] / TEST_ROWS}

        return evaluate

    heterotrain.fit(
        nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 1)), train_set, loss=loss, evaluate=evaluation,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.005), epochs=options.epochs,
        batch_samples=options.batch,
    )  # fmt: skip


if __name__ == "__main__":
    main()
