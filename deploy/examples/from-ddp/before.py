"""Train a small network with DistributedDataParallel: torchrun --nproc-per-node 2 before.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = dataset()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            points, kind = (part.to(device) for part in batch)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), kind)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    model.eval()
    with torch.no_grad():
        points, kind = data.tensors
        print(f"loss {nn.functional.cross_entropy(model(points.to(device)), kind.to(device)):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
