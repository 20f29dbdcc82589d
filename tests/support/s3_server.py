"""A server of S3 in this process, for the client that trainings use; its packages come with ``make test-stores``."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from unittest.mock import patch

import fsspec

from support.ports import free_port

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
