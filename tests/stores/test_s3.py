"""Checkpoints and shards in S3: a real client, a real server, and a training that is killed and continued."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch
import yaml
from heterotrain import ShardCache, Shards
from heterotrain.checkpoints.storage import CHUNK_BYTES, Storage
from support.s3_server import checked_keys, s3_bucket

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, torch, heterotrain
torch.manual_seed(0)
job = heterotrain.init(epochs=2, batch_samples=8, checkpoint_uri=sys.argv[1], checkpoint_interval_s=0)
model = job.wrap(torch.nn.Linear(2, 1))
optimizer = job.optimizer(torch.optim.AdamW(model.parameters()))
data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(32, 2), torch.ones(32, 1))
for step in job.steps(data):
    if step.number == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGTERM)
    with step:
        for x, y in step.micro_batches():
            step.backward(((model(x) - y) ** 2).mean())
        step.apply(optimizer)
torch.save(model.state_dict(), sys.argv[3])
"""


def test_a_large_object_comes_back(tmp_path: Path) -> None:
    """It is uploaded in several parts, and exists only when the last one is there."""
    with s3_bucket() as bucket:
        storage = Storage(f"s3://{bucket}/folder")
        data = os.urandom(CHUNK_BYTES + 5_000_000)
        stored = storage.put("large.bin", [data])
        assert storage.names() == ["large.bin"]
        found = bytearray(len(data))
        storage.get_into(stored, [memoryview(found)])
        assert found == data
        storage.remove(["large.bin", "missing.bin"])
        assert storage.names() == []


def test_a_writer_that_fails_leaves_no_object() -> None:
    """An upload that has begun is given up."""

    def chunks() -> object:
        yield bytes(CHUNK_BYTES)
        raise RuntimeError("lost")

    with s3_bucket() as bucket:
        storage = Storage(f"s3://{bucket}/folder")
        with pytest.raises(RuntimeError, match="lost"):
            storage.put("large.bin", chunks())  # type: ignore[arg-type]  # a generator
        assert storage.names() == []


def test_keys_in_a_mounted_file_change_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old key is refused as soon as the new one is in the file; checkpoints and shards go on."""
    file = tmp_path / "credentials"
    with s3_bucket() as bucket, checked_keys() as keys:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        file.write_text(keys.new())
        storage, cache = Storage(f"s3://{bucket}/folder"), ShardCache(tmp_path / "cache", max_bytes=10)
        storage.put("a.bin", [b"12345678"])
        with cache.local(f"s3://{bucket}/folder/a.bin") as path:
            assert Path(path).read_bytes() == b"12345678"
        file.write_text(keys.new())
        keys.delete_oldest()
        storage.put("b.bin", [b"abcdefgh"])
        assert sorted(storage.names()) == ["a.bin", "b.bin"]
        with cache.local(f"s3://{bucket}/folder/b.bin") as path:
            assert Path(path).read_bytes() == b"abcdefgh"
        keys.delete_oldest()
        with pytest.raises(PermissionError):
            storage.put("c.bin", [b"x"])


def test_a_training_continues_from_s3(tmp_path: Path) -> None:
    """It ends with the weights of one that was not stopped."""
    (tmp_path / "train.py").write_text(SCRIPT)
    paths = [str(ROOT / part) for part in ("core", "trainer")]
    with s3_bucket() as bucket:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}

        def run(folder: str, stop: int) -> subprocess.CompletedProcess[str]:
            arguments = [f"s3://{bucket}/{folder}", str(stop), str(tmp_path / f"{folder}.pt")]
            return subprocess.run(
                [sys.executable, str(tmp_path / "train.py"), *arguments], env=environ, capture_output=True, text=True,
                check=False, timeout=240,
            )  # fmt: skip

        assert run("whole", -1).returncode == 0
        assert run("stopped", 5).returncode == 143
        continued = run("stopped", -1)
        assert continued.returncode == 0, continued.stderr[-3000:]
        assert "continuing from the checkpoint of step 6" in continued.stderr + continued.stdout
    whole, stopped = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "stopped"))
    torch.testing.assert_close(stopped, whole, rtol=0, atol=0)


def test_shards_are_read_through_a_cache(tmp_path: Path) -> None:
    """Each object is fetched once."""
    with s3_bucket() as bucket:
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        for number in range(3):
            files.pipe(f"{bucket}/shards/{number}.bin", bytes([number]) * 100)
        fsspec.filesystem("s3").clear_instance_cache()
        cache = ShardCache(tmp_path, max_bytes=1000)
        uris = [f"s3://{bucket}/shards/{number}.bin" for number in range(3)]
        shards = Shards(uris, [100] * 3, lambda path: Path(path).read_bytes(), cache=cache)
        assert sorted(shards.read(0, 0, 300)) == sorted([0] * 100 + [1] * 100 + [2] * 100)
        assert len(list(tmp_path.glob("*.bin"))) == 3


LANGUAGE_MODEL = ROOT / "deploy/examples/language-model"
SMALL = ("--files", "6", "--width", "16", "--blocks", "1")


def run(*command: str) -> str:
    """Return what a Python command prints, run with this repository's packages and those of ``PART=stores``."""
    paths = [str(ROOT / part) for part in ("core", "planner", "trainer", "operator", "cli")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def heterotrain(*command: str) -> str:
    """Return what a command of ``heterotrain`` prints."""
    return run("-c", "from heterotrain_cli.entry import main; main()", *command)


def test_the_language_model_trains_on_shards_in_s3(tmp_path: Path) -> None:
    """The guide's steps: shards are written, copied to the disk once, trained on; the checkpoint is exported."""
    script, cache = str(LANGUAGE_MODEL / "train.py"), tmp_path / "cache"
    small = (*SMALL, "--epochs", "1", "--cache", str(cache))
    with s3_bucket() as bucket:
        checkpoints = f"s3://{bucket}/checkpoints"
        run(script, *small, "--write-shards", f"s3://{bucket}/text")
        run(script, *small, "--shards", f"s3://{bucket}/text", "--checkpoints", checkpoints)
        heterotrain("export", checkpoints, str(tmp_path / "model.safetensors"))
    assert len(list(cache.glob("*.bin"))) == 8
    assert (tmp_path / "model.safetensors").stat().st_size > 0


@pytest.mark.timeout(900)  # ten processes load PyTorch, one after the other
def test_the_language_model_is_measured_forecast_and_checked_before_it_starts(tmp_path: Path) -> None:
    """The guide's steps before the job: how its script scales on shards in S3, what its job costs, and the checks."""
    script, folder, cache = str(LANGUAGE_MODEL / "train.py"), tmp_path / "bench", tmp_path / "cache"
    job = yaml.safe_load((LANGUAGE_MODEL / "job-s3.yaml").read_text())
    pools = [pool["name"] for pool in job["spec"]["workerPools"]]
    with s3_bucket() as bucket:
        run(script, *SMALL, "--write-shards", f"s3://{bucket}/text")
        options = ("--batch", "32", "--workers", "1,2", "--seconds", "0.5", "--timeout", "200", "--pool", pools[0])
        own = (*SMALL, "--shards", f"s3://{bucket}/text", "--cache", str(cache))
        heterotrain("bench", script, *options, "--folder", str(folder), "--", *own)
        before = fsspec.filesystem("s3", skip_instance_cache=True).find(bucket)
        checks = heterotrain("preflight", "--ranks", "2", "--store", f"s3://{bucket}/language-model", "-o", "json")
        assert fsspec.filesystem("s3", skip_instance_cache=True).find(bucket) == before, "the checks leave nothing"
    rows = json.loads((folder / "bench.json").read_text())["rows"]
    assert [(row["workers"], row["samplesPerSecond"] > 0) for row in rows] == [(1, True), (2, True)]
    assert list(cache.glob("*.bin")), "the shards came from the store"
    found = json.loads(checks)
    assert found["passed"]
    assert {check["verdict"] for check in found["checks"] if check["check"] == "store"} == {"ok"}

    profile = yaml.safe_load((folder / "profile.yaml").read_text())
    profile["members"] = [{**profile["members"][0], "name": name} for name in pools]
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(profile))
    forecast = heterotrain(
        "forecast", str(LANGUAGE_MODEL / "job-s3.yaml"), "--profile", str(tmp_path / "profile.yaml"),
        "--samples-per-epoch", "10000", "-o", "json",
    )  # fmt: skip
    assert json.loads(forecast)["costPerEpoch"] > 0
