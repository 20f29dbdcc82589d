"""Train the LightningModule of before.py, as it is, on unequal workers that come and go."""

import heterotrain
import pytorch_lightning as pl
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
    heterotrain.fit(
        model, data, loss=lambda model, batch: model.training_step(batch, 0),
        optimizer=lambda _parameters: model.configure_optimizers(), clip_norm=1.0, shuffle=False,
        epochs=EPOCHS, batch_samples=BATCH,
    )  # fmt: skip

    model.eval()
    with torch.no_grad():
        points, kind = data.tensors
        device = next(model.parameters()).device
        print(f"loss {nn.functional.cross_entropy(model(points.to(device)), kind.to(device)):.6f}")


if __name__ == "__main__":
    main()
