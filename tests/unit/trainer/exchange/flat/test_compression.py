"""The error of compressed gradients, and overflows, which are sent uncompressed."""

from __future__ import annotations

import pytest
import torch
from heterotrain.exchange.flat.compression import CHUNK_ELEMENTS, ROUNDOFF, Compressor, largest
from heterotrain_core.contract.choices import Compression


def exchanged(compressors: list[Compressor], flats: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Simulate one all-reduce of these ranks; return their common result, and whether it was compressed."""
    packed = [compressor.pack(flat) for compressor, flat in zip(compressors, flats, strict=True)]
    travelled = [p for p in packed if p is not None]
    assert len(travelled) in (0, len(compressors)), "ranks disagree on whether to compress"
    total = torch.stack(flats).sum(0)
    fits = bool(travelled)
    if travelled:
        whole = travelled[0].clone()
        for other in travelled[1:]:
            whole += other  # each partial sum is rounded, as on the wire
        results = [torch.zeros_like(total) for _ in compressors]
        done = {compressor.unpack(whole, result) for compressor, result in zip(compressors, results, strict=True)}
        assert len(done) == 1
        fits = done.pop()
        total = results[0] if fits else total
    for compressor in compressors if not fits else ():
        compressor.learn(total)
    return total, fits


@pytest.mark.parametrize("compression", [Compression.FP16, Compression.BF16])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_the_error_is_within_its_bound_at_any_size(compression: str, size: float) -> None:
    """The bound is W u sum|c| per element, plus fp16's loss below its range; the first step in fp16 is exact."""
    generator, ranks = torch.Generator().manual_seed(3), 5
    compressors = [Compressor(compression) for _ in range(ranks)]
    for step in range(4):
        flats = [size * torch.randn(10_000, generator=generator).pow(3) for _ in range(ranks)]
        scale = compressors[0]._scale or 1.0
        found, packed = exchanged(compressors, flats)
        assert packed == (compression is Compression.BF16 or step > 0)
        exact = torch.stack(flats).double().sum(0)
        allowed = ranks * ROUNDOFF[compression] * torch.stack(flats).double().abs().sum(0) * 1.01
        if compression is Compression.FP16:
            allowed += ranks * 2.0**-25 / scale
        assert bool(((found.double() - exact).abs() <= allowed).all())
        assert float((found.double() - exact).norm() / exact.norm()) < 2 * ROUNDOFF[compression]


def test_a_sum_that_overflows_is_sent_uncompressed() -> None:
    """A gradient that grew a thousandfold overflows fp16: that step is exact, and the next is compressed again."""
    compressors = [Compressor(Compression.FP16) for _ in range(2)]
    small = [torch.ones(4), torch.full((4,), 2.0)]
    exchanged(compressors, small)
    big = [1000 * flat for flat in small]
    found, packed = exchanged(compressors, big)
    assert not packed
    assert torch.equal(found, torch.full((4,), 3000.0))
    assert exchanged(compressors, big)[1]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_no_scale_without_a_finite_sum(value: float) -> None:
    """After a sum that is zero or not finite, the next one is sent uncompressed."""
    compressor = Compressor(Compression.FP16)
    compressor.learn(torch.full((3,), value))
    assert compressor.pack(torch.ones(3)) is None


def test_half_gradients_are_not_compressed() -> None:
    """They have that size already."""
    assert Compressor(Compression.BF16).pack(torch.ones(3, dtype=torch.float16)) is None


def test_the_largest_element() -> None:
    """It is not finite if any element is not finite."""
    assert largest(torch.tensor([1.0, -3.0])) == 3.0
    assert not largest(torch.tensor([1.0, float("nan")])) < float("inf")
    assert largest(torch.empty(0)) == 0.0


@pytest.mark.parametrize("size", [CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS + 3])
def test_long_buckets_are_rounded_in_chunks_like_short_ones_in_one_piece(size: int) -> None:
    """Every element is equal for any length, and the scale is the one that follows from the sum itself."""
    flat = torch.randn(size, generator=torch.Generator().manual_seed(8))
    compressor, scale = Compressor(Compression.FP16), 2.0**6
    compressor.learn(torch.tensor([3.0]))
    assert compressor._scale == scale
    packed = compressor.pack(flat)
    assert packed is not None
    assert torch.equal(packed, (flat * scale).to(torch.float16))
    found, other = torch.zeros(size), Compressor(Compression.FP16)
    assert compressor.unpack(packed, found)
    assert torch.equal(found, packed.float() / scale)
    other.learn(found)
    assert other._scale == compressor._scale
