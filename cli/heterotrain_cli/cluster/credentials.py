"""Credentials of a user of a kubeconfig: token, file, certificate, password, or a program of the cloud."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from heterotrain_operator.api.text import quoted

Authorization = Callable[[], str]
"""Returns the header ``Authorization`` of a request; empty for none."""
_EARLY_S: Final = 60.0
"""A credential is renewed so long before it expires."""
_LOGIN_TIMEOUT_S: Final = 300.0
"""A program may ask a person to log in."""
_EXEC_VERSIONS: Final = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")


class LoginError(Exception):
    """A way to log in fails; the message is a part of a sentence."""


class Program:
    """A program of the user's ``exec`` entry, which prints credentials that expire."""

    def __init__(self, entry: Mapping[str, Any], now_s: Callable[[], float] = time.time) -> None:
        """Take the entry; the program is not started yet."""
        self._entry, self._now_s = entry, now_s
        self._status: Mapping[str, Any] = {}
        self._until_s = 0.0

    def status(self) -> Mapping[str, Any]:
        """Return the credentials, new ones where the last have expired.

        Raises:
            LoginError: the program is not there, fails, or prints something else.
        """
        if not self._status or self._now_s() > self._until_s - _EARLY_S:
            self._status = self._printed()
            end = self._status.get("expirationTimestamp")
            self._until_s = datetime.fromisoformat(str(end)).timestamp() if end else float("inf")
        return self._status

    def __call__(self) -> str:
        """Return the header; empty where the program gives a certificate only."""
        token = self.status().get("token")
        return f"Bearer {token}" if token else ""

    def _printed(self) -> Mapping[str, Any]:
        entry = self._entry
        version = str(entry.get("apiVersion"))
        if version not in _EXEC_VERSIONS:
            raise LoginError(f"the kubeconfig's login program speaks {quoted(version)}: use {_EXEC_VERSIONS[0]}")
        command = [str(entry["command"]), *map(str, entry.get("args") or ())]
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": os.isatty(0)}}
        own = {str(each["name"]): str(each["value"]) for each in entry.get("env") or ()}
        try:
            done = subprocess.run(
                command, env={**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(info)},
                stdout=subprocess.PIPE, check=True, timeout=_LOGIN_TIMEOUT_S,
            )  # fmt: skip
            status: Mapping[str, Any] = json.loads(done.stdout)["status"]
        except FileNotFoundError as error:
            hint = f": {' '.join(str(entry['installHint']).split())}" if entry.get("installHint") else ""
            raise LoginError(f"the login program {quoted(command[0])} is not installed{hint}") from error
        except (OSError, subprocess.SubprocessError) as error:
            raise LoginError(f"the login program {quoted(command[0])} fails: run it by hand") from error
        except (ValueError, KeyError, TypeError) as error:
            raise LoginError(f"the login program {quoted(command[0])} prints no ExecCredential") from error
        return status


def authorization_of(user: Mapping[str, Any]) -> Authorization:
    """Return how a user's requests are authorized, in kubectl's order."""
    if token := user.get("token"):
        return lambda: f"Bearer {token}"
    if file := user.get("tokenFile"):  # a pod's token is renewed in its file
        return lambda: f"Bearer {Path(file).read_text(encoding='utf-8').strip()}"
    if user.get("username"):
        pair = base64.b64encode(f"{user['username']}:{user.get('password') or ''}".encode()).decode()
        return lambda: f"Basic {pair}"
    if entry := user.get("exec"):
        return Program(entry)
    if provider := user.get("auth-provider"):
        token = (provider.get("config") or {}).get("id-token")
        if not token:
            raise LoginError(f"the login by {quoted(str(provider.get('name')))} has no id-token: use an exec plugin")
        return lambda: f"Bearer {token}"
    return lambda: ""


def certificate_of(user: Mapping[str, Any], authorization: Authorization) -> tuple[bytes, bytes] | None:
    """Return the user's certificate and key in PEM, if they log in by one."""
    if isinstance(authorization, Program):
        status = authorization.status()
        pair = status.get("clientCertificateData"), status.get("clientKeyData")
        return (str(pair[0]).encode(), str(pair[1]).encode()) if all(pair) else None
    found = []
    for name in ("client-certificate", "client-key"):
        if data := user.get(f"{name}-data"):
            found.append(base64.b64decode(data))
        elif path := user.get(name):
            found.append(Path(path).read_bytes())
    return (found[0], found[1]) if len(found) == 2 else None  # noqa: PLR2004  # a pair
