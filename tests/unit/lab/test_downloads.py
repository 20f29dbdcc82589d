"""Releases from a server on loopback that serves, fails and lies: verified files, one clear sentence, no waiting."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from local_cluster import download, paths, releases, toolchain
from local_cluster.process import Problem

PATIENT = download.Limits(probe_s=60, stall_s=60, judge_s=600)
"""For hosts that answer: they may be as slow as the machine that runs the tests."""
HASTY = download.Limits(probe_s=0.2, stall_s=0.2)
"""For hosts that never answer."""
TOOL = b"#!/bin/sh\necho tool\n"


def packed(**files: bytes) -> bytes:
    """Return a tar archive with these files below a folder, as releases have them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"release/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@dataclass
class Host:
    """A server of files; ``behaviours`` are called in place of an answer, by path."""

    files: dict[str, bytes]
    behaviours: dict[str, Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    address: str = ""

    @property
    def downloaded(self) -> list[str]:
        """The paths of the files that were sent, not only asked about."""
        return [path for verb, path in (line.split() for line in self.asked) if verb == "GET"]


@pytest.fixture
def host() -> Iterator[Host]:
    """A server on loopback with a program and an archive."""
    found = Host({"/tool": TOOL, "/suite.tar.gz": packed(alpha=b"A" * 1000, beta=b"B", readme=b"?")})

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            if behave := found.behaviours.get(self.path):
                found.asked.append(f"GET {self.path}")
                behave(self)
            else:
                self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            found.asked.append(f"{self.command} {self.path}")
            body = found.files.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            if with_body and body is not None:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    found.address = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache; compiling writes a file and notes the program's name in the returned list."""
    names: list[str] = []

    def compile_instead(_module: Path, programs: list[toolchain.Program]) -> None:
        for program in programs:
            names.append(program.name)
            for name in program.files:
                (paths.programs() / name).write_text("compiled")

    monkeypatch.setenv("HETEROTRAIN_CACHE", str(tmp_path))
    monkeypatch.delenv("BINARIES", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(toolchain, "_compile", compile_instead)
    monkeypatch.setattr(toolchain, "PROGRAMS", (TOOL_PROGRAM, ALPHA, BETA, OWN))
    return names


OWN, TOOL_PROGRAM, ALPHA, BETA = (toolchain.Program(package=f"./{name}") for name in ("own", "tool", "alpha", "beta"))
EVERYTHING = ["tool", "alpha", "beta", "own"]


def manifest(host: Host) -> tuple[releases.Release, ...]:
    """Return the releases of the host: a program by itself, and two in an archive."""
    members = {"alpha": "release/alpha", "beta": "release/beta"}
    tool = releases.File(url=f"{host.address}/tool", sha256=hashlib.sha256(TOOL).hexdigest())
    suite = releases.File(
        url=f"{host.address}/suite.tar.gz",
        sha256=hashlib.sha256(host.files["/suite.tar.gz"]).hexdigest(),
        members=members,
    )
    return (
        releases.Release(name="tools", replaces=("tool",), files=(tool,)),
        releases.Release(name="suite", replaces=("alpha", "beta"), files=(suite,)),
    )


def build(
    monkeypatch: pytest.MonkeyPatch,
    held: tuple[releases.Release, ...],
    choice: str = "",
    limits: download.Limits = PATIENT,
) -> None:
    """Build all programs, given these releases and a value of the variable BINARIES."""
    monkeypatch.setattr(releases, "known", lambda: held)
    monkeypatch.setenv("BINARIES", choice)
    toolchain.build_programs(limits=limits)


def content(name: str) -> bytes:
    return (paths.programs() / name).read_bytes()


def test_released_programs_are_downloaded_and_only_the_others_compiled(
    host: Host, compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(monkeypatch, manifest(host))
    assert compiled == ["own"]
    assert (content("tool"), content("alpha"), content("beta")) == (TOOL, b"A" * 1000, b"B")
    assert all(os.access(paths.programs() / name, os.X_OK) for name in ("tool", "alpha", "beta"))
    left = {path.name for path in paths.programs().iterdir() if not path.name.startswith(".")}
    assert left == {"tool", "alpha", "beta", "own"}, "no archive, no draft, no other member"
    assert "downloading tools, suite" in capsys.readouterr().err

    asked = len(host.asked)
    build(monkeypatch, manifest(host))
    assert len(host.asked) == asked, "a second run asks no host"
    assert compiled == ["own"]


def test_another_sum_is_downloaded_again_and_nothing_else(
    host: Host, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(monkeypatch, manifest(host))
    host.files["/suite.tar.gz"] = packed(alpha=b"A2", beta=b"B2")
    build(monkeypatch, manifest(host))
    assert host.downloaded == ["/tool", "/suite.tar.gz", "/suite.tar.gz"]
    assert (content("alpha"), compiled) == (b"A2", ["own"])


def test_what_was_compiled_is_not_downloaded_afterwards(
    host: Host, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(monkeypatch, manifest(host), "compile")
    assert (compiled, host.asked) == (EVERYTHING, []), "compiling asks no host"
    build(monkeypatch, manifest(host))
    assert (len(compiled), host.asked) == (4, []), "it is there"
    build(monkeypatch, manifest(host), "download")
    assert (len(compiled), sorted(host.downloaded)) == (4, ["/suite.tar.gz", "/tool"])
    build(monkeypatch, manifest(host), "compile")
    assert compiled[4:] == ["tool", "alpha", "beta"], "asked for again, it replaces what was downloaded"


def cut(request: BaseHTTPRequestHandler) -> None:
    """Send half of the body and close the connection."""
    request.send_response(200)
    request.send_header("Content-Length", str(len(TOOL)))
    request.end_headers()
    request.wfile.write(TOOL[: len(TOOL) // 2])


def endless(request: BaseHTTPRequestHandler) -> None:
    """Send more bytes than announced in small pieces, by the encoding that announces none."""
    request.send_response(200)
    request.end_headers()
    request.wfile.write(b"x" * (len(TOOL) + 1))


def reset(request: BaseHTTPRequestHandler) -> None:
    """Close the connection without an answer."""
    request.connection.shutdown(socket.SHUT_RDWR)


def wrong(request: BaseHTTPRequestHandler) -> None:
    """Send as many other bytes."""
    request.send_response(200)
    request.send_header("Content-Length", str(len(TOOL)))
    request.end_headers()
    request.wfile.write(TOOL[::-1])


def refuse(request: BaseHTTPRequestHandler) -> None:
    """Answer that there is no such file any more."""
    request.send_error(410)


FAULTS = {
    cut: "broke off after",
    endless: "is not the file that this version expects",
    reset: "could not be downloaded",
    wrong: "is not the file that this version expects",
    refuse: "the host answers 410",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: each.__name__)
def test_a_host_that_fails_or_lies_costs_only_its_own_release(
    fault: Callable[[BaseHTTPRequestHandler], None],
    host: Host,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host.behaviours["/tool"] = fault
    build(monkeypatch, manifest(host))
    said = [line for line in capsys.readouterr().err.splitlines() if FAULTS[fault] in line]
    assert len(said) == 1
    assert f"{host.address}/tool" in said[0]
    assert said[0].endswith("tools is compiled instead")
    assert (compiled, content("tool")) == (["tool", "own"], b"compiled")
    assert content("alpha") == b"A" * 1000
    assert not [path for path in paths.programs().rglob("*") if path.suffix == ".part" or path.name == "download"]


def test_a_forced_download_ends_with_one_sentence(
    host: Host, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host.behaviours["/tool"] = cut
    with pytest.raises(Problem, match=FAULTS[cut]) as caught:
        build(monkeypatch, manifest(host), "download")
    assert "\n" not in str(caught.value)
    assert not compiled
    assert not (paths.programs() / "tool").exists()


def test_a_host_that_falls_silent_is_left(
    host: Host, compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = threading.Event()

    def fall_silent(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(TOOL)))
        request.end_headers()
        request.wfile.write(TOOL[:3])
        request.wfile.flush()
        left.wait(60)

    host.behaviours["/tool"] = fall_silent
    stall = download.Limits(probe_s=PATIENT.probe_s, stall_s=HASTY.stall_s)
    tools = manifest(host)[:1]
    build(monkeypatch, tools, limits=stall)
    assert compiled == EVERYTHING
    assert (
        f"{host.address}/tool could not be downloaded: the host is silent: tools is compiled" in capsys.readouterr().err
    )
    with pytest.raises(Problem, match="the host is silent"):
        build(monkeypatch, tools, "download", limits=stall)
    left.set()


def test_a_file_that_the_host_lacks_is_compiled_without_a_download(
    host: Host, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = manifest(host)
    del host.files["/tool"]
    build(monkeypatch, held)
    assert (compiled, host.downloaded) == (["tool", "own"], ["/suite.tar.gz"])
    with pytest.raises(Problem, match=r"no host answers for .*/tool: allow compiling"):
        build(monkeypatch, held, "download")


def test_hosts_that_do_not_answer_are_not_waited_for(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never answers
        held = manifest(Host({"/suite.tar.gz": b""}, address=f"http://127.0.0.1:{deaf.getsockname()[1]}"))
        build(monkeypatch, held, limits=HASTY)
    assert compiled == EVERYTHING
    for name in EVERYTHING:
        (paths.programs() / name).unlink()
    build(monkeypatch, held)  # now the port refuses connections
    assert compiled == 2 * EVERYTHING
    assert "downloading" not in capsys.readouterr().err


def test_a_body_without_end_is_not_written_to_the_disk(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "LARGEST_FILE_BYTES", 10)
    host.behaviours["/tool"] = endless
    with pytest.raises(Problem, match="/tool is larger than 0 MB"):
        download.Downloads(10, PATIENT).fetch(f"{host.address}/tool", "0" * 64, tmp_path / "file")
    assert not list(tmp_path.iterdir())
    assert download.sizes([f"{host.address}/suite.tar.gz"], PATIENT) == {}, "nor is it asked for"


def test_a_slow_host_is_left_as_soon_as_its_speed_tells(host: Host, tmp_path: Path) -> None:
    """Of a file of an hour's length the first pieces suffice; who insists gets all of it."""
    hour = download.Limits(judge_s=0, whole_s=600, progress_s=0)
    body, sha256 = host.files["/suite.tar.gz"], hashlib.sha256(host.files["/suite.tar.gz"]).hexdigest()
    with pytest.raises(Problem, match="too few for 1000000000 MB within 10 minutes"):
        download.Downloads(10**15, hour).fetch(f"{host.address}/suite.tar.gz", sha256, tmp_path / "file")
    assert not list(tmp_path.iterdir())
    download.Downloads(10**15, download.patient(hour)).fetch(f"{host.address}/suite.tar.gz", sha256, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == body


def test_a_choice_that_is_none_is_refused(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Problem, match="BINARIES is 'downlaod', but it can be download, compile"):
        build(monkeypatch, (), "downlaod")
    assert not compiled
