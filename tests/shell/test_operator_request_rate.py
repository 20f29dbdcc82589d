"""A bound of the operator's requests, on a clock of the test."""

from __future__ import annotations

from heterotrain_operator.kube.client import RequestRate


class Time:
    """A clock that goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def passed(rate: RequestRate, time: Time, count: int) -> float:
    begun_s = time.now_s
    for _ in range(count):
        await rate.turn()
    return time.now_s - begun_s


async def test_a_second_s_worth_passes_at_once_and_the_rest_at_the_rate() -> None:
    time = Time()
    rate = RequestRate(8.0, clock=time, sleep=time.sleep)
    time.now_s += 100.0
    assert await passed(rate, time, 8) == 0.0
    assert await passed(rate, time, 16) == 2.0, "rest is not saved for longer than a second"


async def test_without_a_bound_nothing_waits() -> None:
    time = Time()
    assert await passed(RequestRate(0.0, clock=time, sleep=time.sleep), time, 1000) == 0.0
