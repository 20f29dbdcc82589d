"""A member is as slow as its slowest rank, and none of its steps counts twice."""

from __future__ import annotations

from dataclasses import replace

from heterotrain_planner.perf.counters import MeanVariance, Observation
from heterotrain_planner.perf.ranks import observations_of_member


def seen(share: int, *, at_s: float, compute_s: float, steps: int = 5, backward_s: float | None = None) -> Observation:
    """Return an observation of a rank."""
    backward = None if backward_s is None else MeanVariance(mean=backward_s)
    return Observation(
        member="u/0", share_samples=share, steps=steps, ended_s=at_s, compute=MeanVariance(mean=compute_s),
        backward=backward,
    )  # fmt: skip


def test_each_phase_is_that_of_its_slowest_rank() -> None:
    one = (seen(8, at_s=1.0, compute_s=0.5, backward_s=0.1), seen(16, at_s=2.0, compute_s=0.9))
    two = (seen(8, at_s=1.0, compute_s=0.4, backward_s=0.3), seen(16, at_s=2.0, compute_s=1.1))
    found = observations_of_member([one, two])
    assert [(o.share_samples, o.steps, o.compute and o.compute.mean) for o in found] == [(8, 5, 0.5), (16, 5, 1.1)]
    assert found[0].backward == MeanVariance(mean=0.3)


def test_steps_count_once_also_where_ranks_were_scraped_differently() -> None:
    """Old observations of one rank may have been merged in another way, or a rank may have none."""
    one = (seen(8, at_s=1.0, compute_s=0.5), seen(8, at_s=2.0, compute_s=0.6))
    two = (seen(8, at_s=1.5, compute_s=9.0, steps=9),)
    assert observations_of_member([one, two, ()]) == one
    assert observations_of_member([(), ()]) == ()
    assert observations_of_member([]) == ()


def test_the_observations_of_a_single_rank_are_the_members() -> None:
    one = (seen(8, at_s=1.0, compute_s=0.5), replace(seen(4, at_s=1.0, compute_s=0.2), warm_up=True))
    assert observations_of_member([one]) == one


def test_the_first_steps_of_any_rank_make_the_observation_a_warm_up() -> None:
    one, two = seen(8, at_s=1.0, compute_s=0.5), seen(8, at_s=1.0, compute_s=0.5, steps=3)
    assert observations_of_member([(one,), (replace(two, warm_up=True),)])[0].warm_up
