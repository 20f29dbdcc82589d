"""``heterotrain-operator check`` reads Prometheus as the operator does: with its credentials and its authorities."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from heterotrain_core.version import __version__
from heterotrain_operator.cli import _prometheus_problems, main
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.errors import KubeError
from support.cli_runner import CliRunner
from support.ports import free_port

VECTOR = {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "1"]}]}}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A Prometheus behind a token, or a user and a password."""
    known = {"Bearer secret", f"Basic {base64.b64encode(b'me:word').decode()}"}

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") not in known:
            raise web.HTTPUnauthorized
        return web.Response(body=json.dumps(VECTOR))

    app = web.Application()
    app.router.add_route("*", "/api/v1/query", answer)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


def options(url: str, *, auth_dir: Path | None = None, ca_file: str = "") -> dict[str, Any]:
    return {
        "prometheus_url": url,
        "prometheus_timeout_seconds": 5.0,
        "prometheus_auth_dir": str(auth_dir or ""),
        "prometheus_ca_file": ca_file,
    }


@pytest.mark.parametrize("secret", [{"token": "secret\n"}, {"username": "me", "password": "word"}])
async def test_a_prometheus_with_credentials_passes(url: str, tmp_path: Path, secret: dict[str, str]) -> None:
    for name, text in secret.items():
        (tmp_path / name).write_text(text)
    assert await _prometheus_problems(options(url, auth_dir=tmp_path)) == []


async def test_wrong_credentials_are_named_with_the_value_to_check(url: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("old")
    (problem,) = await _prometheus_problems(options(url, auth_dir=tmp_path))
    assert problem.startswith(url)
    assert "check prometheus.auth" in problem


async def test_an_address_without_a_scheme_is_one_sentence() -> None:
    (problem,) = await _prometheus_problems(options("prometheus:9090"))
    assert problem.endswith("write http://prometheus:9090 or https://prometheus:9090")


async def test_a_missing_certificate_authority_is_one_sentence(tmp_path: Path) -> None:
    (problem,) = await _prometheus_problems(options("https://prometheus:9090", ca_file=str(tmp_path / "ca.crt")))
    assert "ca.crt can't be read: [Errno 2] No such file or directory" in problem


async def test_a_prometheus_that_does_not_answer_is_one_sentence() -> None:
    (problem,) = await _prometheus_problems(options(f"http://127.0.0.1:{free_port()}"))
    assert "Prometheus can't be reached" in problem


async def test_a_missing_kubeconfig_is_named(tmp_path: Path) -> None:
    with pytest.raises(KubeError, match=f"{tmp_path}/config does not exist"):
        await load_configuration(f"{tmp_path}/config")


def test_the_command_has_a_version_and_short_help() -> None:
    assert CliRunner().invoke(main, ["--version"]).output.split()[-1] == __version__
    assert CliRunner().invoke(main, ["-h"]).exit_code == 0


def test_a_mistake_in_a_setting_s_value_names_the_setting() -> None:
    done = CliRunner().invoke(main, ["run", "--namespace-weights", "a=x"], prog_name="heterotrain-operator")
    assert done.exit_code == 2
    assert "Error: " in done.stderr
    assert "weights" in done.stderr.rpartition("Error: ")[2]


def test_without_a_command_the_help_is_the_answer() -> None:
    assert "Commands:" in CliRunner().invoke(main, [], prog_name="heterotrain-operator").output
