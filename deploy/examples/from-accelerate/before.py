"""Train a small network with Accelerate: accelerate launch --num-processes 2 before.py, or torchrun."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = dataset()
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for _ in range(EPOCHS):
        for points, kind in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), kind)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    model = accelerator.unwrap_model(model)
    model.eval()
    with torch.no_grad():
        points, kind = data.tensors
        device = next(model.parameters()).device
        print(f"loss {nn.functional.cross_entropy(model(points.to(device)), kind.to(device)):.6f}")


if __name__ == "__main__":
    main()
