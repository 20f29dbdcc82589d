"""Train a small network with the Trainer of transformers: torchrun --nproc-per-node 2 before.py."""

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import SequentialSampler, TensorDataset
from transformers import Trainer, TrainingArguments

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


class InOrder(Trainer):
    """A Trainer that does not shuffle, so that losses can be compared."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)


def main():
    """Train, and print the last loss."""
    data, model, size = dataset(), Spirals(), int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH // size, learning_rate=0.01,
            weight_decay=0.01, lr_scheduler_type="constant", max_grad_norm=1.0, remove_unused_columns=False,
            report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        )  # fmt: skip
        trainer = InOrder(model=model, args=settings, train_dataset=data, data_collator=collate)
        trainer.train()

    model.eval()
    with torch.no_grad():
        points, kind = data.tensors
        device = next(model.parameters()).device
        print(f"loss {model(points.to(device), kind.to(device))['loss']:.6f}")


if __name__ == "__main__":
    main()
