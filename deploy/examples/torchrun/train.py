"""Train with DistributedDataParallel and a checkpoint after each epoch: torchrun --nproc-per-node 2 train.py.

Nothing here knows heterotrain. Like any script for torchrun's elastic mode, it continues from its own checkpoint.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 60


def dataset():
    """Return points on two interleaved spirals, and the spiral of each."""
    generator = torch.Generator().manual_seed(0)
    turn, kind = torch.rand(1200, generator=generator) * 6, torch.arange(1200) % 2
    angle = turn + torch.pi * kind
    noise = 0.1 * torch.randn(1200, 2, generator=generator)
    return TensorDataset(torch.stack([turn * angle.cos(), turn * angle.sin()], 1) + noise, kind)


def main():
    """Train, print the last loss, and leave the checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    given = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if given.checkpoint.exists():
        saved = torch.load(given.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    parallel = DistributedDataParallel(model)
    data = dataset()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    if dist.get_rank() == 0:
        print(f"epoch {first} with {dist.get_world_size()} processes", flush=True)

    for epoch in range(first, given.epochs):
        for batch in loader:
            points, kind = (part.to(device) for part in batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(parallel(points), kind).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            new = given.checkpoint.with_suffix(".new")
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(saved, new)
            new.rename(given.checkpoint)

    if dist.get_rank() == 0:
        with torch.no_grad():
            points, kind = (part.to(device) for part in data.tensors)
            print(f"loss {nn.functional.cross_entropy(model(points), kind):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
