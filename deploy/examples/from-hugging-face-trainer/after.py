"""Train the model of before.py, as it is, on unequal workers that come and go."""

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


class Spirals(nn.Module):
    """A network for the spirals, in the form that the Trainer of transformers takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, points, labels):
        """Return loss and logits."""
        logits = self.net(points)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(samples):
    """Return a batch by the names of the model's arguments."""
    points, kind = zip(*samples, strict=True)
    return {"points": torch.stack(points), "labels": torch.stack(kind)}


def groups(model):
    """Return the parameters as the Trainer groups them: biases do not decay."""
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


def main():
    """Train, and print the last loss."""
    data, model = dataset(), Spirals()
    heterotrain.fit(
        model, data, loss=lambda model, batch: model(**batch)["loss"], collate=collate,
        optimizer=lambda _parameters: torch.optim.AdamW(groups(model), lr=0.01), clip_norm=1.0, shuffle=False,
        epochs=EPOCHS, batch_samples=BATCH,
    )  # fmt: skip

    model.eval()
    with torch.no_grad():
        points, kind = data.tensors
        device = next(model.parameters()).device
        print(f"loss {model(points.to(device), kind.to(device))['loss']:.6f}")


if __name__ == "__main__":
    main()
