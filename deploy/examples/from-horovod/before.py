"""Train a small network with Horovod: horovodrun -np 2 python before.py."""

import horovod.torch as hvd
import torch
from torch import nn
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
    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = dataset()
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    loader = DataLoader(data, batch_size=BATCH // hvd.size(), sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            points, kind = (part.to(device) for part in batch)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), kind)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {mean:.4f}")

    model.eval()
    with torch.no_grad():
        points, kind = data.tensors
        print(f"loss {nn.functional.cross_entropy(model(points.to(device)), kind.to(device)):.6f}")


if __name__ == "__main__":
    main()
