"""Train a small network with AdaptDL: python before.py alone, or as an AdaptDLJob."""

import adaptdl.torch as adl
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
    adl.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = adl.AdaptiveDataParallel(model, optimizer)
    data = dataset()
    loader = adl.AdaptiveDataLoader(data, batch_size=BATCH, drop_last=True)

    for _ in adl.remaining_epochs_until(EPOCHS):
        for points, kind in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), kind)
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        points, kind = data.tensors
        print(f"loss {nn.functional.cross_entropy(model(points), kind):.6f}")


if __name__ == "__main__":
    main()
