"""Files from the hosts of releases: which of them answer, then one file after another, verified, with its progress."""

from __future__ import annotations

import hashlib
import http.client
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from local_cluster.process import Problem, say

CHUNK_BYTES = 1 << 18
LARGEST_FILE_BYTES = 1_000_000_000
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Waits for a network that may be slow, silent or absent.

    Attributes:
        probe_s: time for the answers of all hosts together.
        stall_s: longest time without a byte of a file.
        whole_s: time for all files; compiling takes about as long.
        judge_s: age of a download from which its speed tells how long the rest takes.
        progress_s: time between two lines about the progress.
    """

    probe_s: float = 5
    stall_s: float = 20
    whole_s: float = 600
    judge_s: float = 20
    progress_s: float = 5


def sizes(urls: Iterable[str], limits: Limits) -> Mapping[str, int]:
    """Ask for the headers of all files at once, and return the sizes in bytes of those whose hosts answer in time.

    A file that its host does not have, or of an unknown or absurd size, is left out.
    """
    found: dict[str, int] = {}

    def ask(url: str) -> None:
        try:
            with _open(url, "HEAD", limits.probe_s) as answer:
                size = int(answer.headers.get("Content-Length") or 0)
        except (OSError, http.client.HTTPException, ValueError):
            return
        if 0 < size <= LARGEST_FILE_BYTES:
            found[url] = size

    # Daemons: nothing bounds the time that a name's resolution takes, and no thread may delay the end of the program.
    threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]
    deadline_s = time.monotonic() + limits.probe_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return dict(found)


class Downloads:
    """Downloads of several files, which share their limits and the report of their progress.

    Args:
        total_bytes: the size of all files, for the report.
        limits: when to give up.
    """

    def __init__(self, total_bytes: int, limits: Limits) -> None:
        self._limits = limits
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._started_s = self._reported_s = time.monotonic()

    def fetch(self, url: str, sha256: str, target: Path) -> None:
        """Download a file into ``target``, which exists afterwards only if its content has the SHA-256.

        Raises:
            Problem: the host does not answer or refuses, the file breaks off or comes too slowly, or it is another one.
        """
        draft = target.with_name(f".{target.name}.part")
        try:
            found = self._stream(url, draft)
            if found != sha256:
                raise Problem(
                    f"{url} is not the file that this version expects: its SHA-256 is {found}, not {sha256}; "
                    "a proxy may have put another file in its place"
                )
            draft.replace(target)
        except (OSError, http.client.HTTPException) as error:
            raise Problem(f"{url} could not be downloaded: {_reason(error)}") from error
        finally:
            draft.unlink(missing_ok=True)

    def _stream(self, url: str, target: Path) -> str:
        """Write the body to a file and return its SHA-256."""
        summary = hashlib.sha256()
        with (
            _open(url, "GET", self._limits.stall_s) as answer,
            target.open("wb") as file,
        ):
            expected = int(answer.headers.get("Content-Length") or LARGEST_FILE_BYTES)
            exact = answer.headers.get("Content-Length") is not None
            received = 0
            # read1: a slow body shows its progress, and each wait for it is bounded by the timeout above.
            while chunk := answer.read1(CHUNK_BYTES):
                received += len(chunk)
                if received > expected:
                    raise Problem(f"{url} is larger than {expected / MEGABYTE:.0f} MB")
                file.write(chunk)
                summary.update(chunk)
                self._count(len(chunk), urlsplit(url).hostname or url)
            if exact and received < expected:
                raise Problem(f"{url} broke off after {received} of {expected} bytes")
        return summary.hexdigest()

    def _count(self, count: int, host: str) -> None:
        self._done_bytes += count
        now_s, limits = time.monotonic(), self._limits
        took_s = now_s - self._started_s
        bytes_per_s = self._done_bytes / max(took_s, 0.001)
        whole_s = max(self._total_bytes, self._done_bytes) / bytes_per_s
        if took_s > limits.whole_s or (took_s > limits.judge_s and whole_s > limits.whole_s):
            raise Problem(
                f"{host} sends {bytes_per_s / MEGABYTE:.2f} MB/s, too few for {self._total_bytes / MEGABYTE:.0f} MB "
                f"within {limits.whole_s / 60:.0f} minutes"
            )
        if now_s - self._reported_s >= limits.progress_s:
            self._reported_s = now_s
            done, total = self._done_bytes / MEGABYTE, self._total_bytes / MEGABYTE
            say(f"    … {done:.0f} of {total:.0f} MB, {bytes_per_s / MEGABYTE:.1f} MB/s")


def patient(limits: Limits) -> Limits:
    """Return the limits for someone who insists on downloads: only a silent host ends them."""
    return Limits(probe_s=4 * limits.probe_s, stall_s=limits.stall_s, whole_s=math.inf, progress_s=limits.progress_s)


def _open(url: str, method: str, timeout_s: float) -> http.client.HTTPResponse:
    # A host may answer a program without a name with 403. A manifest has only addresses with https, or on loopback.
    request = urllib.request.Request(url, method=method, headers={"User-Agent": "heterotrain"})  # noqa: S310  # as above
    answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)  # noqa: S310  # as above
    return answer


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the host answers {error.code} {error.reason}"
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return "the host is silent"
    return str(getattr(error, "reason", None) or error) or type(error).__name__
