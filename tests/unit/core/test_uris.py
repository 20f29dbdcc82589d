"""Passwords in URIs are recognized and hidden, whatever characters they have; ports and names are none."""

from __future__ import annotations

import pytest
from heterotrain_core.uris import has_credentials, redacted


# Keys of S3 contain slashes.
@pytest.mark.parametrize("secret", ["hush", "hu/sh", "/hush", "1hush", "h:ush", "hush=", "%2Fhush", "12345"])
def test_a_password_is_found_and_hidden(secret: str) -> None:
    uri = f"s3://key:{secret}@bucket/folder"
    assert has_credentials(uri)
    assert redacted(f"cannot read '{uri}': denied, see a@b") == "cannot read 's3://***@bucket/folder': denied, see a@b"


@pytest.mark.parametrize("query", ["token=hush", "X-Amz-Signature=1&x=hush"])
def test_a_query_is_found_and_hidden(query: str) -> None:
    assert has_credentials(f"gs://bucket/folder?{query}")
    assert redacted(f"gs://bucket/folder?{query} refused") == "gs://bucket/folder?*** refused"


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/a",
        "ftp://host:21/a@b",
        "sftp://me@host/x",
        "abfs://files@account.dfs.net/x",
        "file:///a/b#c",
        "/a:b@c",
    ],
)
def test_other_uris_stay(uri: str) -> None:
    assert not has_credentials(uri)
    assert redacted(uri) == uri
