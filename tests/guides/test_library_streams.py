"""Streams of Hugging Face datasets, WebDataset and torchdata are read on from their own states where they have one."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from heterotrain.data.stream_reading import STATE_SAMPLES, StreamReading, StreamReadings, StreamState
from torch.utils.data import Dataset

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
SAMPLES = 3 * STATE_SAMPLES + 100
SHARDS = 4


class Numbers(Dataset[dict[str, int]]):
    """A data set with indices, for a loader that saves its position."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": index}


def hugging_face(folder: Path) -> Any:
    """Return text files that are read one after the other, as a corpus is."""
    datasets = pytest.importorskip("datasets", reason="make test-all PART=guides installs it")
    files = []
    for shard in range(SHARDS):
        lines = (json.dumps({"id": number}) for number in range(shard, SAMPLES, SHARDS))
        files.append(folder / f"{shard}.jsonl")
        files[-1].write_text("\n".join(lines))
    names = [str(file) for file in files]
    return datasets.load_dataset("json", data_files=names, split="train", streaming=True, cache_dir=str(folder / "hf"))


def shuffled(folder: Path) -> Any:
    """Return the same with a shuffle buffer, which its state leaves out."""
    return hugging_face(folder).shuffle(seed=3, buffer_size=100)


def webdataset(folder: Path) -> Any:
    """Return tar files with one entry a sample; the library has no ``state_dict``."""
    library = pytest.importorskip("webdataset", reason="make test-all PART=guides installs it")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, SAMPLES, SHARDS):
                data = json.dumps({"id": number}).encode()
                entry = tarfile.TarInfo(f"{number:06d}.json")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return library.WebDataset(f"{folder}/{{0..{SHARDS - 1}}}.tar", shardshuffle=False).decode()


def webdataset_shuffled(folder: Path) -> Any:
    """Return them through a shuffle buffer that draws from Python's generator."""
    return webdataset(folder).shuffle(50, rng=random)


def webdataset_by_the_clock(folder: Path) -> Any:
    """Return them through the same buffer as the library sets it up: it draws by the time of day."""
    return webdataset(folder).shuffle(50)


def stateful_loader(_folder: Path) -> Any:
    """Return torchdata's loader of shuffled batches; a batch is a sample of the stream."""
    library = pytest.importorskip("torchdata.stateful_dataloader", reason="make test-all PART=guides installs it")
    generator = torch.Generator().manual_seed(5)
    return library.StatefulDataLoader(Numbers(), batch_size=1, shuffle=True, generator=generator, num_workers=0)


def identities(readings: Iterable[StreamReading]) -> list[tuple[int, int]]:
    """Return position and number of each sample."""
    return [(reading.position, _number(reading.sample)) for reading in readings]


def _number(sample: Any) -> int:
    return int(sample.get("json", sample)["id"])


def read_again(make: Callable[[Path], Any], folder: Path) -> tuple[list[StreamReading], list[tuple[int, int]]]:
    """Return a reading of a whole epoch, and what a new process reads from position 512 on."""
    whole = list(StreamReadings(make(folder), seed=7).begin(0))
    assert sorted(number for _, number in identities(whole)) == list(range(SAMPLES))
    known = [reading.state for reading in whole if reading.state is not None]
    assert [state.position for state in known] == [0, 256, 512, 768]
    since = StreamState.decoded(known[2].encoded())
    return whole, identities(StreamReadings(make(folder), seed=7).begin(0, since))


@pytest.mark.parametrize("make", [hugging_face, stateful_loader], ids=["datasets", "torchdata"])
def test_a_new_process_reads_on_from_the_state(
    make: Callable[[Path], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads nothing that comes before."""
    whole, again = read_again(make, tmp_path)
    assert again == identities(whole)[512:]
    assert not caplog.records


@pytest.mark.parametrize(
    ("make", "warning"),
    [
        (shuffled, "does not continue from its own state_dict"),
        (webdataset, ""),
        (webdataset_shuffled, ""),
    ],
    ids=["datasets, shuffled", "webdataset", "webdataset, shuffled"],
)
def test_a_new_process_reads_the_same_order_from_the_beginning(
    make: Callable[[Path], Any], warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream without a state, or with one that leaves something out, loses nothing."""
    whole, again = read_again(make, tmp_path)
    assert again == identities(whole)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("heterotrain")]
    assert [warning in message for message in ours] == [True] * bool(warning)


def test_a_shuffle_by_the_clock_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run reads another order, and says so."""
    whole, again = read_again(webdataset_by_the_clock, tmp_path)
    assert again != identities(whole)
    assert "other samples after sample 512 of epoch 0 than the first time" in caplog.text


@pytest.mark.parametrize("make", [hugging_face, stateful_loader], ids=["datasets", "torchdata"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_later_epoch_is_read_on_by_another_process(make: Callable[[Path], Any], place: int, tmp_path: Path) -> None:
    """Its order is that of the process that has read the epochs before it, also from the epoch's very beginning."""
    first = StreamReadings(make(tmp_path), seed=7)
    list(first.begin(0))
    whole = list(first.begin(1))
    known = [reading.state for reading in whole if reading.state is not None][place]
    assert identities(StreamReadings(make(tmp_path), seed=7).begin(1, known)) == identities(whole)[known.position :]
    assert identities(first.begin(1, known)) == identities(whole)[known.position :]
    assert sorted(number for _, number in identities(whole)) == list(range(SAMPLES))
