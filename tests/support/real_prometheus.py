"""A real Prometheus on the loopback interface, with series of known values at known times.

Samples come by remote write, so no test waits for a scrape: queries are evaluated at the time of the last sample.
"""

from __future__ import annotations

import json
import struct
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.ports import free_port
from support.programs import program
from support.waiting import wait_until

PROMETHEUS = program("prometheus")
START_S = 1_700_000_000
"""Time of the first sample."""


class RealPrometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def write(self, series: Mapping[tuple[tuple[str, str], ...], Callable[[float], float]], times_s: range) -> None:
        """Store a sample of each series (its labels, and its value by seconds since the start) at each time."""
        body = _snappy(b"".join(_field(1, _time_series(labels, value, times_s)) for labels, value in series.items()))
        headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
        request = urllib.request.Request(f"{self.url}/api/v1/write", body, headers)  # noqa: S310  # on the loopback
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  # loopback
            assert answer.status == 204

    def query(self, promql: str, at_s: float) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the values of an instant query by their labels; ``at_s`` counts from the start."""
        text = urllib.parse.urlencode({"query": promql, "time": START_S + at_s})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{text}", timeout=30) as answer:  # noqa: S310  # loopback
                found = json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{promql}: {error.read().decode()}") from error
        assert found["resultType"] == "vector"
        return {tuple(sorted(row["metric"].items())): float(row["value"][1]) for row in found["result"]}


@contextmanager
def real_prometheus(folder: Path) -> Iterator[RealPrometheus]:
    """Start Prometheus with its data in ``folder``, and end it afterwards."""
    assert PROMETHEUS is not None
    (folder / "prometheus.yml").write_text("{}")
    port = free_port()
    options = [
        f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=100y", f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-remote-write-receiver",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log, subprocess.Popen([PROMETHEUS, *options], stdout=log, stderr=log) as server:
        try:
            found = RealPrometheus(f"http://127.0.0.1:{port}")
            wait_until(
                lambda: _ready(found.url) or server.poll() is not None, "Prometheus is ready", timeout_s=60,
                evidence=(folder / "log").read_text,
            )  # fmt: skip
            assert server.poll() is None, (folder / "log").read_text()
            yield found
        finally:
            server.kill()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:  # noqa: S310  # loopback
            return bool(answer.status == 200)
    except OSError:
        return False


def _time_series(labels: Iterable[tuple[str, str]], value: Callable[[float], float], times_s: range) -> bytes:
    encoded = [_field(1, _field(1, name.encode()) + _field(2, text.encode())) for name, text in sorted(labels)]
    for time_s in times_s:
        sample = b"\x09" + struct.pack("<d", value(time_s)) + b"\x10" + _varint((START_S + time_s) * 1000)
        encoded.append(_field(2, sample))
    return b"".join(encoded)


def _field(number: int, content: bytes) -> bytes:
    """Return a protobuf field with a length."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _snappy(content: bytes) -> bytes:
    """Return the content in Snappy's block format, as literals only."""
    encoded = _varint(len(content))
    for first in range(0, len(content), 60):
        part = content[first : first + 60]
        encoded += bytes([len(part) - 1 << 2]) + part
    return encoded
