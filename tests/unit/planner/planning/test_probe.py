"""Probe vectors: every learner varies, sums and limits hold."""

from __future__ import annotations

from heterotrain_planner.planning.probe import LARGEST_VARIATION, Limits, probe_vectors
from hypothesis import given
from hypothesis import strategies as st

FREE = Limits(least=1, most=None, granularity=1)


def test_three_even_members_vary_by_a_half_or_so() -> None:
    """The member that stands alone against two moves more, so that the sum stays."""
    vectors = probe_vectors((171, 171, 170), (FREE,) * 3, (0, 1, 2))
    assert vectors[0] == (171, 171, 170)
    assert len(set(vectors[1:])) == 2
    for vector in vectors:
        assert sum(vector) == 512
    for rank in range(3):
        seen = {vector[rank] for vector in vectors}
        assert len(seen) == 3
        assert max(seen) <= 171 * (1 + LARGEST_VARIATION) + 1
        assert min(abs(n - 171) for n in seen - {171, 170}) > 50


def test_members_of_a_pool_move_together() -> None:
    """Named by pool, at most one pool is torn apart: then only one of the two vectors is slower than even shares."""
    for vector in probe_vectors((100,) * 6, (FREE,) * 6, (0, 3, 4, 1, 2, 5))[1:]:
        assert vector[0] == vector[3] == vector[4]
        assert vector[1] == vector[2] == vector[5] == 200 - vector[0]


def test_one_learner_varies_and_the_others_absorb_it() -> None:
    """A joiner is probed alone; no other member moves more than needed."""
    vectors = probe_vectors((100, 100, 100), (FREE,) * 3, (2,))
    assert {vector[2] for vector in vectors} == {50, 100, 150}
    assert {vector[0] for vector in vectors} <= {75, 100, 125}


def test_known_members_stay_near_their_shares() -> None:
    """Two large learners and a small member of known speed: it varies by a half and does not fall to one sample."""
    for vector in probe_vectors((272, 117, 59), (FREE,) * 3, (0, 1))[1:]:
        assert sum(vector) == 448
        assert 29 <= vector[2] <= 89
        assert min(abs(vector[0] - 272), abs(vector[1] - 117)) > 50


def test_without_anything_to_vary_there_is_no_probe() -> None:
    """One member, or limits that hold every share."""
    assert probe_vectors((8,), (FREE,), (0,)) == ()
    held = Limits(least=4, most=4, granularity=1)
    assert probe_vectors((4, 4), (held, held), (0, 1)) == ()


@st.composite
def situations(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Limits, ...], tuple[int, ...]]:
    """Return shares, limits that hold them, and learners."""
    shares, limits = [], []
    for _ in range(draw(st.integers(1, 6))):
        granularity = draw(st.integers(1, 4))
        share = draw(st.integers(0, 40)) * granularity
        limits.append(
            Limits(
                least=draw(st.integers(0, share)),
                most=draw(st.none() | st.integers(share, share + 60)),
                granularity=granularity,
            )
        )
        shares.append(share)
    learners = draw(st.lists(st.integers(0, len(shares) - 1), unique=True))
    return tuple(shares), tuple(limits), tuple(learners)


@given(situations())
def test_every_vector_keeps_sum_and_limits(
    situation: tuple[tuple[int, ...], tuple[Limits, ...], tuple[int, ...]],
) -> None:
    """Whatever the limits and granularities."""
    shares, limits, learners = situation
    for vector in probe_vectors(shares, limits, learners):
        assert sum(vector) == sum(shares)
        for share, limit in zip(vector, limits, strict=True):
            assert share >= limit.least
            assert limit.most is None or share <= limit.most
            assert share % limit.granularity == 0
