"""The work queue in fake time: dirty once, never twice at a time, and a failing key delays only itself."""

from __future__ import annotations

import asyncio

import pytest
from heterotrain_operator.engine.queue import BEHIND_EVERY, FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Queue

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


async def ready(queue: Queue[str]) -> list[str]:
    """Return the keys that can be had at once."""
    found = []
    while len(queue):
        found.append(await queue.get())
    return found


async def test_a_key_is_dirty_at_most_once() -> None:
    queue: Queue[str] = Queue()
    for key in ("a", "b", "a"):
        queue.add(key)
    assert await ready(queue) == ["a", "b"]


async def test_a_key_that_changes_while_it_is_handled_is_handled_once_more_afterwards() -> None:
    queue: Queue[str] = Queue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    assert await ready(queue) == [], "never twice at a time"
    queue.done("a")
    assert await ready(queue) == ["a"]


async def test_waiting_for_a_key_ends_when_one_comes() -> None:
    queue: Queue[str] = Queue()
    queue.add_after("a", 7.0)
    started_s = now()
    assert await queue.get() == "a"
    assert now() - started_s == pytest.approx(7.0)


async def test_the_sooner_of_two_wishes_counts_and_a_change_counts_at_once() -> None:
    queue: Queue[str] = Queue()
    queue.add_after("a", 10.0)
    queue.add_after("a", 3.0)
    queue.add_after("a", 20.0)
    started_s = now()
    await queue.get()
    assert now() - started_s == pytest.approx(3.0)
    queue.done("a")
    queue.add_after("a", 10.0)
    queue.add("a")
    await queue.get()
    assert now() - started_s == pytest.approx(3.0)


async def test_failures_wait_longer_and_longer_and_success_forgets_them() -> None:
    queue: Queue[str] = Queue()
    queue.add("a")
    waits = []
    for _ in range(10):
        started_s = now()
        await queue.get()
        waits.append(now() - started_s)
        queue.failed("a")
    assert waits[:4] == pytest.approx([0.0, FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S])
    assert max(waits) == pytest.approx(LONGEST_BACKOFF_S)
    await queue.get()
    queue.done("a")
    queue.add("a")
    await queue.get()
    assert queue.failed("a") == pytest.approx(FIRST_BACKOFF_S)


async def test_a_failing_key_delays_nobody() -> None:
    queue: Queue[str] = Queue()
    queue.add("bad")
    queue.add("good")
    assert await queue.get() == "bad"
    queue.failed("bad")
    started_s = now()
    assert await queue.get() == "good"
    assert now() == started_s


async def test_a_server_that_asks_us_to_wait_is_given_that_time() -> None:
    queue: Queue[str] = Queue()
    queue.add("a")
    await queue.get()
    assert queue.failed("a", at_least_s=30.0) == pytest.approx(30.0)


async def test_a_forgotten_key_does_not_come_back() -> None:
    queue: Queue[str] = Queue()
    queue.add_after("a", 1.0)
    queue.forget("a")
    await asyncio.sleep(5.0)
    assert await ready(queue) == []


async def test_what_changed_comes_before_what_is_only_looked_at_again_and_moves_up_when_it_changes() -> None:
    queue: Queue[str] = Queue()
    queue.add_behind(["a", "b", "c"])
    queue.add("x")
    queue.add("b")
    assert await ready(queue) == ["x", "b", "a", "c"]


async def test_however_much_changes_those_behind_have_their_turn() -> None:
    queue: Queue[str] = Queue()
    queue.add_behind(["patient"])
    for number in range(100):
        queue.add(f"busy-{number}")
    served = [await queue.get() for _ in range(BEHIND_EVERY)]
    assert "patient" in served


async def test_a_key_that_waits_or_is_handled_is_not_put_behind() -> None:
    queue: Queue[str] = Queue()
    queue.add("handled")
    assert await queue.get() == "handled"
    queue.add("waits")
    queue.add_behind(["waits", "handled"])
    assert await ready(queue) == ["waits"]
