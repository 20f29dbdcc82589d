"""A server of S3 in this process, for the client that trainings use; ``make test-all PART=stores`` has its packages."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import fsspec

from support.ports import free_port

PACKAGES = Path(sys.prefix) / "stores"
"""The folder with the packages."""
HAS_S3 = find_spec("s3fs") is not None and find_spec("moto") is not None
"""Whether the packages of client and server are there."""


@cache
def _server() -> str:
    """Start the server, once for the test process, and return its address."""
    port = free_port()
    import_module("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False).start()
    return f"http://127.0.0.1:{port}"


@contextmanager
def s3_bucket() -> Iterator[str]:
    """Give the name of an empty bucket; inside the ``with`` block, the environment names the server, as in a pod."""
    variables = {
        "AWS_ENDPOINT_URL": _server(), "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with patch.dict(os.environ, variables):
        name = f"bucket-{uuid.uuid4().hex}"
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
        yield name


class Keys:
    """Access keys of a user of the server who may do anything."""

    def __init__(self) -> None:
        self._iam = import_module("boto3").client("iam")
        self._iam.create_user(UserName="training")
        allowed = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
        self._iam.put_user_policy(UserName="training", PolicyName="all", PolicyDocument=json.dumps(allowed))
        self._ids: list[str] = []

    def new(self) -> str:
        """Make a key and return the text of a file with it."""
        _check_keys(after="inf")
        made = self._iam.create_access_key(UserName="training")["AccessKey"]
        _check_keys(after="0")
        self._ids.append(made["AccessKeyId"])
        return f"[default]\naws_access_key_id={made['AccessKeyId']}\naws_secret_access_key={made['SecretAccessKey']}\n"

    def delete_oldest(self) -> None:
        """Delete the oldest key, which is refused from now on."""
        _check_keys(after="inf")
        self._iam.delete_access_key(UserName="training", AccessKeyId=self._ids.pop(0))
        _check_keys(after="0")

    def close(self) -> None:
        """Delete the user, and let the server take any key again."""
        while self._ids:
            self.delete_oldest()
        _check_keys(after="inf")
        self._iam.delete_user_policy(UserName="training", PolicyName="all")
        self._iam.delete_user(UserName="training")


@contextmanager
def checked_keys() -> Iterator[Keys]:
    """Let the server check keys inside the ``with`` block, which is inside that of ``s3_bucket``."""
    keys = Keys()
    try:
        yield keys
    finally:
        keys.close()


def _check_keys(*, after: str) -> None:
    """Let the server check keys after so many requests."""
    request = urllib.request.Request(  # noqa: S310  # its own server
        f"{_server()}/moto-api/reset-auth", data=after.encode(), headers={"Content-Type": "text/plain"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60):  # noqa: S310  # its own server
        pass
