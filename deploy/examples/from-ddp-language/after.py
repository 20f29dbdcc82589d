"""Train a small GPT on unequal workers that come and go: the model and schedule of before.py, and a shorter loop."""

import math
import textwrap
from pathlib import Path

import heterotrain
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name
from torch.utils.data import TensorDataset

STEPS, BATCH, MICRO, WARM_UP, EVERY = 40, 16, 4, 5, 20
LENGTH, WIDTH, HEADS, BLOCKS, PEAK = 32, 48, 4, 2, 0.01


class Block(nn.Module):
    """Causal attention and a perceptron, each on a residual path."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        """Return (batch, length, width)."""
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(self.first(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.second(x))


class GPT(nn.Module):
    """Predicts the next byte; embedding and head share their weights."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(BLOCKS)]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, x):
        """Return (batch, length, 256) for bytes of (batch, length)."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))


def groups(model):
    """Return the parameters with weight decay, the matrices, and those without."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def factor(step):
    """Return the part of the peak learning rate: warm-up, then a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


def windows(seed, count):
    """Return random windows of a long text, and the same one byte later."""
    text = torch.frombuffer(bytearray(Path(textwrap.__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(seed))
    rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def cross_entropy(output, y):
    """Return the mean over all bytes."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def main():
    """Train, and evaluate on all ranks together every few steps."""
    job = heterotrain.init(epochs=1, batch_samples=BATCH, micro_batch_samples=MICRO)
    torch.manual_seed(0)
    model = job.wrap(GPT())
    optimizer = job.optimizer(torch.optim.AdamW(groups(model), lr=PEAK, betas=(0.9, 0.95)))
    job.scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, factor))
    training, validation = windows(1, STEPS * BATCH), windows(2, 64)

    @job.every_steps(EVERY)
    def evaluate(_steps):
        found = job.evaluate(validation, lambda output, y: {"loss": cross_entropy(output, y)}, batch_samples=16)
        if job.is_leader:
            print(f"loss {found['loss']:.6f}")
        return found

    for step in job.steps(training, shuffle=False):
        with step:
            for x, y in step.micro_batches():
                step.backward(cross_entropy(model(x), y))
            step.apply(optimizer, clip_norm=1.0)


if __name__ == "__main__":
    main()
