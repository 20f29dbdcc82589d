"""Texts of all ranks: any lengths, up to a limit that every rank refuses alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from heterotrain.errors import UsageError
from heterotrain.network.texts import MOST_BYTES, gather_texts


def ranks(*texts: bytes) -> Any:
    """Return the group of the first rank; the others say the other texts."""

    def gather(own: bytes, *_purpose: object) -> SimpleNamespace:
        assert len(own) == max(map(len, texts)), "messages of one length"
        return SimpleNamespace(rows=[own, *(text.ljust(len(own)) for text in texts[1:])])

    lengths = [[float(len(text))] for text in texts]
    return SimpleNamespace(gather_now=lambda *_: lengths, gather=gather, wait=lambda *_: None)


def test_texts_of_any_lengths_arrive() -> None:
    assert [text.strip() for text in gather_texts(ranks(b"a", b"", b"abc"), b"a", "names")] == [b"a", b"", b"abc"]


def test_a_text_that_is_too_long_is_refused_before_there_is_memory_for_it() -> None:
    group = ranks(b"a")
    group.gather_now = lambda *_: [[1.0], [MOST_BYTES + 1.0]]
    group.gather = None
    with pytest.raises(UsageError, match="names takes 67108865 bytes on a rank, and at most 67108864 are possible"):
        gather_texts(group, b"a", "names")
