"""Train a small network with Lightning: torchrun --nproc-per-node 2 before.py."""

import os

import pytorch_lightning as pl
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


class Spirals(pl.LightningModule):
    """A network for the spirals."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, points):
        """Return the logits."""
        return self.net(points)

    def training_step(self, batch, _index):
        """Return the mean loss of a batch."""
        points, kind = batch
        return nn.functional.cross_entropy(self(points), kind)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main():
    """Train, and print the last loss."""
    data, model = dataset(), Spirals()
    size, local_size = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        max_epochs=EPOCHS, gradient_clip_val=1.0, devices=local_size, num_nodes=size // local_size,
        strategy="ddp" if size > 1 else "auto", accelerator="auto", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, use_distributed_sampler=False,
    )  # fmt: skip
    sampler = DistributedSampler(data, num_replicas=size, rank=int(os.environ.get("RANK", "0")), shuffle=False)
    trainer.fit(model, DataLoader(data, batch_size=BATCH // size, sampler=sampler))

    model.eval()
    with torch.no_grad():
        points, kind = data.tensors
        device = next(model.parameters()).device
        print(f"loss {nn.functional.cross_entropy(model(points.to(device)), kind.to(device)):.6f}")


if __name__ == "__main__":
    main()
