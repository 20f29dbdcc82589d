"""Train a small transformer to continue paragraphs of Python's own documentation, letter by letter.

Paragraphs differ in length, so a batch's loss is a sum over letters. ``step.backward(loss_sum, weight=letters)`` gives
the gradient over all letters of the global batch, however the paragraphs are divided among the workers. Each topic of
the documentation is a shard, and workers open shards one after the other. Run it anywhere:

    python train.py --epochs 2          one process on a laptop
    torchrun --nproc-per-node 2 train.py
    kubectl create configmap text-script --from-file train.py && kubectl apply -f job.yaml
"""

import argparse
import math
from pydoc_data.topics import topics

import heterotrain
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name

LETTERS, END, LONGEST, SHORTEST = 128, 0, 192, 40


def paragraphs(topic):
    """Return a topic's paragraphs as sequences of letters, each between two end marks."""
    texts = [text.strip() for text in topics[topic].split("\n\n")]
    texts = [text for text in texts if len(text) >= SHORTEST and text.isascii()]
    return [torch.tensor([END, *text[:LONGEST].encode(), END], dtype=torch.uint8) for text in texts]


def padded(sequences):
    """Return the input and target letters of a batch; targets after a paragraph's end are -1."""
    length = max(len(sequence) for sequence in sequences)
    whole = torch.full((len(sequences), length), -1)
    for row, sequence in zip(whole, sequences, strict=True):
        row[: len(sequence)] = sequence
    return whole[:, :-1].clamp(min=END), whole[:, 1:]


class Network(nn.Module):
    """A causal transformer over letters."""

    def __init__(self, width, layers):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(LONGEST + 1, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, letters):
        """Return the scores of each next letter."""
        places = torch.arange(letters.shape[1], device=letters.device)
        mask = nn.Transformer.generate_square_subsequent_mask(letters.shape[1], device=letters.device)
        return self.head(self.layers(self.letters(letters) + self.places(places), mask=mask, is_causal=True))


def loss_of(model, letters, targets):
    """Return the sum of the loss over all letters, and the number of letters."""
    total = F.cross_entropy(model(letters).transpose(1, 2), targets, ignore_index=-1, reduction="sum")
    return total, int((targets >= 0).sum())


def main():
    """Train, and report the bits per letter on topics of a separate test set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=len(topics), help="number of topics to use")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=0.002)
    parser.add_argument("--epochs", type=int, default=3, help="epochs, without an operator")
    parser.add_argument("--batch", type=int, default=64, help="paragraphs per global batch, without an operator")
    parser.add_argument("--workers", type=int, default=0, help="processes that load samples ahead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    names = sorted(topics)[: options.topics]
    test_names, train_names = names[::8], [name for index, name in enumerate(names) if index % 8]
    counts = [len(paragraphs(name)) for name in train_names]
    train_set = heterotrain.Shards(train_names, counts, paragraphs, keep=len(names))
    test_set = [paragraph for name in test_names for paragraph in paragraphs(name)]

    job = heterotrain.init(epochs=options.epochs, batch_samples=options.batch)
    model = job.wrap(Network(options.width, options.layers))
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=options.learning_rate))

    @job.on_epoch_end
    def evaluate(_epoch):
        sums = [loss_of(model, *batch) for batch in job.part(test_set, batch_samples=32, collate=padded)]
        whole = job.sum(loss=sum(float(total) for total, _ in sums), letters=sum(count for _, count in sums))
        return {"bits_per_letter": whole["loss"] / whole["letters"] / math.log(2)}

    for step in job.steps(train_set, collate=padded, workers=options.workers):
        with step:
            for letters, targets in step.micro_batches():
                loss, count = loss_of(model, letters, targets)
                step.backward(loss, weight=count)
            step.apply(optimizer, clip_norm=1.0)


if __name__ == "__main__":
    main()
