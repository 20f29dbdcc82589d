"""Train a small GPT on the source text of Python's own libraries, byte by byte, as a sequence of blocks.

The model is built by a function, without memory, and ``step.compute`` runs its passes. So the script does not depend
on where the parts of the model are. The embedding and the head share their weights. Run it anywhere:

    python train.py --epochs 2          one process on a laptop
    torchrun --nproc-per-node 2 train.py
    torchrun --nproc-per-node 2 train.py --parallelism pipeline
    kubectl create configmap language-model-script --from-file train.py && kubectl apply -f job.yaml

With shards in a store, such as S3, and copies of them on the local disk (docs/large-models.md):

    python train.py --write-shards s3://bucket/text
    python train.py --shards s3://bucket/text --cache /cache
"""

import argparse
import functools
import json
import math
import sysconfig
from pathlib import Path

import fsspec
import heterotrain
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name

BYTES = 256
EVERY = 8  # the part of the windows that is kept for tests


def windows(files, length):
    """Return the text of library modules, cut into windows of the same length, plus one byte for the last target."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:files])
    whole = len(text) // (length + 1) * (length + 1)
    return torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).view(-1, length + 1)


def write_shards(uri, rows, count):
    """Write windows as ``count`` shards of raw bytes, and an index with the number of windows in each."""
    parts = rows.tensor_split(count)
    for number, part in enumerate(parts):
        with fsspec.open(f"{uri}/{number}.bin", "wb") as file:
            file.write(part.numpy().tobytes())
    with fsspec.open(f"{uri}/index.json", "w") as file:
        json.dump({"length": rows.shape[1], "counts": [len(part) for part in parts]}, file)


def open_windows(path, length):
    """Return the windows of a shard."""
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).view(-1, length)


def read_shards(uri, cache, gigabytes):
    """Return the windows of all shards, each of which is copied to the folder ``cache`` once for a machine."""
    with fsspec.open(f"{uri}/index.json") as file:
        index = json.load(file)
    copies = heterotrain.ShardCache(cache, max_bytes=int(gigabytes * 1e9))
    uris = [f"{uri}/{number}.bin" for number in range(len(index["counts"]))]
    return heterotrain.Shards(
        uris, index["counts"], functools.partial(open_windows, length=index["length"]), cache=copies
    )


def pairs(rows):
    """Return the input and target bytes of a batch."""
    batch = torch.stack(rows).long()
    return batch[:, :-1], batch[:, 1:]


class Embedding(nn.Module):
    """Bytes and their places."""

    def __init__(self, width, length):
        super().__init__()
        self.letters, self.places = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.reset_parameters()

    def reset_parameters(self):
        """Begin with small values: the letters' weights are the head's, too."""
        for table in (self.letters, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, letters):
        """Return a vector for each byte."""
        return self.letters(letters) + self.places(torch.arange(letters.shape[1], device=letters.device))


class Block(nn.Module):
    """Causal attention and a perceptron, each on a residual path."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        """Return the vectors after the block."""
        shape = (*x.shape[:2], self.heads, -1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.attention(self.norm_1(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.mix(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.narrow(F.gelu(self.wide(self.norm_2(x)))))


class GPT(nn.Module):
    """An embedding, blocks, and a head that shares the embedding's weights."""

    def __init__(self, width, blocks, heads, length):
        super().__init__()
        self.embedding = Embedding(width, length)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embedding.letters.weight

    def forward(self, letters):
        """Return the scores of each next byte."""
        x = self.embedding(letters)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(scores, targets):
    """Return the mean loss over the bytes of a batch."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def main():
    """Train, and report the bits per byte on windows of a separate test set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=160, help="library modules to read")
    parser.add_argument("--length", type=int, default=128, help="bytes of a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=0.002)
    parser.add_argument("--epochs", type=int, default=3, help="epochs, without an operator")
    parser.add_argument("--parallelism", default="data", help="data, sharded or pipeline, without an operator")
    parser.add_argument("--batch", type=int, default=64, help="windows per global batch, without an operator")
    parser.add_argument("--write-shards", metavar="URI", help="write the text as shards to this folder, and end")
    parser.add_argument("--shards", metavar="URI", help="folder with shards to train on")
    parser.add_argument("--cache", default="/tmp/shards", help="local folder for copies of shards")  # noqa: S108  # an own folder in the container
    parser.add_argument("--cache-gigabytes", type=float, default=10.0)
    parser.add_argument("--checkpoints", metavar="URI", help="folder of checkpoints, without an operator")
    options = parser.parse_args()
    torch.set_num_threads(1)

    text = windows(options.files, options.length)
    is_test = torch.arange(len(text)) % EVERY == 0
    train_set, test_set = text[~is_test], text[is_test]
    if options.write_shards:
        write_shards(options.write_shards, train_set, 8)
        return
    if options.shards:
        train_set = read_shards(options.shards, options.cache, options.cache_gigabytes)

    job = heterotrain.init(
        epochs=options.epochs, batch_samples=options.batch, parallelism=options.parallelism,
        checkpoint_uri=options.checkpoints,
    )  # fmt: skip
    job.wrap(lambda: GPT(options.width, options.blocks, options.heads, options.length), units="blocks")
    optimizer = job.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=options.learning_rate))

    @job.on_epoch_end
    def evaluate(_epoch):
        found = job.evaluate(test_set, lambda scores, y: {"loss": loss_of(scores, y)}, batch_samples=64, collate=pairs)
        return {"bits_per_byte": found["loss"] / math.log(2)}

    for step in job.steps(train_set, collate=pairs):
        with step:
            step.compute(loss_of)
            step.apply(optimizer, clip_norm=1.0)


if __name__ == "__main__":
    main()
