"""Train a small network on unequal workers that come and go: the same as before.py, without a line on processes."""

import heterotrain
import torch
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS, BATCH = 3, 64


def dataset():
    """Return points on two interleaved spirals, and the spiral of each."""
    torch.manual_seed(0)
    turn, kind = torch.rand(1024) * 6, torch.arange(1024) % 2
    angle = turn + torch.pi * kind
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) + 0.1 * torch.randn(1024, 2)
    return TensorDataset(points, kind)


def main():
    """Train, and print the last loss."""
    job = heterotrain.init(epochs=EPOCHS, batch_samples=BATCH)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    model = job.wrap(model)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = dataset()

    for step in job.steps(data, shuffle=False):
        with step:
            for points, kind in step.micro_batches():
                step.backward(nn.functional.cross_entropy(model(points), kind))
            step.apply(optimizer)

    model.eval()
    with torch.no_grad():
        points, kind = data.tensors
        print(f"loss {nn.functional.cross_entropy(model(points.to(job.device)), kind.to(job.device)):.6f}")


if __name__ == "__main__":
    main()
