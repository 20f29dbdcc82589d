"""The script of `make bench-convergence`: digits with many wrong labels, trained until a target accuracy.

Wrong labels make gradients noisy, so a large batch pays off, and more so as training progresses. That is the purpose of
an adaptive batch. Accuracy is measured on other digits, with correct labels. The script runs in a pod together with the
digits example's own script (`train.py`), whose pictures it uses.
"""

import argparse
import json
import time
from pathlib import Path

import heterotrain
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name
from train import TEST_IMAGES, Augmented, load_digits


class Stream(torch.utils.data.Dataset):
    """Augmented digits in portions, a different one for each epoch; a part of the labels is random."""

    def __init__(self, images, labels, samples, portions, wrong):
        self.pictures = Augmented(images, labels, samples * portions)
        self.samples, self.portion = samples, 0
        draw = torch.Generator().manual_seed(2)
        drawn = torch.randint(0, 10, (samples * portions,), generator=draw)
        given = labels[torch.arange(samples * portions) % len(labels)]
        self.given = torch.where(torch.rand(samples * portions, generator=draw) < wrong, drawn, given)

    def __len__(self):
        return self.samples

    def __getitems__(self, indices):
        places = torch.as_tensor(indices) + self.portion * self.samples
        pictures = self.pictures.__getitems__(places)
        return [(picture, label) for (picture, _), label in zip(pictures, self.given[places], strict=True)]


def network(width, hidden):
    """Return the network: ``width`` sets the cost of a sample, ``hidden`` the size of the exchanged gradient."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 16, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


def main():
    """Train until the target accuracy or the last epoch; the leader writes the curve, one line per epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples-per-epoch", type=int, required=True)
    parser.add_argument("--wrong", type=float, required=True, help="part of the labels that is random")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--portions", type=int, default=64, help="most epochs")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--target", type=float, required=True, help="test accuracy at which training ends")
    parser.add_argument("--curve", type=Path, required=True, help="file for the curve")
    options = parser.parse_args()
    torch.set_num_threads(1)

    images, labels = load_digits()
    train_set = Stream(
        images[:-TEST_IMAGES], labels[:-TEST_IMAGES], options.samples_per_epoch, options.portions, options.wrong
    )
    test_set = Augmented(images[-TEST_IMAGES:], labels[-TEST_IMAGES:], 3 * TEST_IMAGES)

    job = heterotrain.init()  # seeds torch with the job's seed, so each seed has another network
    model = job.wrap(network(options.width, options.hidden))
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=options.learning_rate))
    counted = {"steps": 0, "samples": 0, "accuracy": 0.0}

    def note():
        if job.is_leader:
            with options.curve.open("a") as file:
                file.write(json.dumps({"at_s": time.time(), **counted}) + "\n")

    @job.on_epoch_end
    def evaluate(epoch):
        train_set.portion = epoch + 1
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in job.part(test_set, batch_samples=100))
        accuracy = job.sum(right=right)["right"] / len(test_set)
        counted["accuracy"] = accuracy
        note()
        if accuracy >= options.target:
            job.finish(f"test accuracy {accuracy:.3f}")
        return {"accuracy": accuracy}

    for step in job.steps(train_set):
        if not counted["steps"]:
            note()
        with step:
            for x, y in step.micro_batches():
                step.backward(F.cross_entropy(model(x), y))
            step.apply(optimizer)
        counted["steps"] += 1
        counted["samples"] += step.batch_samples


if __name__ == "__main__":
    main()
