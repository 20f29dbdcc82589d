"""The work queue in fake time: dirty once, processed once at a time, and a failing key delays only itself."""

from __future__ import annotations

import asyncio

import pytest
from heterotrain_operator.engine.queue import FAIR_EVERY, FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Priority, Queue

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


async def ready(queue: Queue[str]) -> list[str]:
    """Return the keys that are available at once."""
    found = []
    while len(queue):
        found.append(await queue.get())
    return found


async def test_a_key_is_dirty_at_most_once() -> None:
    queue: Queue[str] = Queue()
    for key in ("a", "b", "a"):
        queue.add(key)
    assert await ready(queue) == ["a", "b"]


async def test_a_key_that_changes_during_its_processing_is_processed_once_more() -> None:
    queue: Queue[str] = Queue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    assert await ready(queue) == [], "never twice at a time"
    queue.done("a")
    assert await ready(queue) == ["a"]


async def test_get_waits_for_the_next_key() -> None:
    queue: Queue[str] = Queue()
    queue.add_after("a", 7.0)
    started_s = now()
    assert await queue.get() == "a"
    assert now() - started_s == pytest.approx(7.0)


async def test_the_earlier_of_two_delays_counts_and_a_change_counts_at_once() -> None:
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


async def test_each_failure_doubles_the_wait_and_success_resets_it() -> None:
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


async def test_a_failing_key_delays_no_other() -> None:
    queue: Queue[str] = Queue()
    queue.add("bad")
    queue.add("good")
    assert await queue.get() == "bad"
    queue.failed("bad")
    started_s = now()
    assert await queue.get() == "good"
    assert now() == started_s


async def test_a_pause_that_the_server_requests_is_respected() -> None:
    queue: Queue[str] = Queue()
    queue.add("a")
    await queue.get()
    assert queue.failed("a", at_least_s=30.0) == pytest.approx(30.0)


async def test_a_routine_look_that_is_due_first_is_as_urgent_as_the_failed_pass() -> None:
    queue: Queue[str] = Queue()
    queue.add_urgent("a")
    await queue.get()
    queue.add_after("a", FIRST_BACKOFF_S / 2)
    queue.failed("a")
    queue.add("b")
    await asyncio.sleep(FIRST_BACKOFF_S / 2)
    assert await ready(queue) == ["a", "b"]
    await asyncio.sleep(2 * FIRST_BACKOFF_S)
    assert await ready(queue) == []


async def test_a_change_during_the_wait_is_as_urgent_as_the_failed_pass() -> None:
    """After a conflict, the watch soon delivers the other writer's change."""
    queue: Queue[str] = Queue()
    queue.add_urgent("a")
    await queue.get()
    queue.failed("a")
    queue.add("b")
    queue.add("a")
    assert await ready(queue) == ["a", "b"]


async def test_a_forgotten_key_does_not_return() -> None:
    queue: Queue[str] = Queue()
    queue.add_after("a", 1.0)
    queue.forget("a")
    await asyncio.sleep(5.0)
    assert await ready(queue) == []


async def test_a_routine_pass_comes_after_others_and_at_the_newest_time() -> None:
    queue: Queue[str] = Queue()
    queue.add_routine_after("a", 1.0)
    queue.add_routine_after("a", 3.0)
    await asyncio.sleep(2.0)
    assert await ready(queue) == []
    await asyncio.sleep(2.0)
    queue.add("b")
    assert await ready(queue) == ["b", "a"]


async def test_any_pass_chooses_the_time_of_the_routine_one_anew() -> None:
    queue: Queue[str] = Queue()
    for key in ("a", "b", "c"):
        queue.add_routine_after(key, 1.0)
    queue.add("a")
    assert await queue.get() == "a"
    queue.done("a")
    queue.add("b")
    await queue.get()
    queue.failed("b", at_least_s=30.0)
    queue.add_routine_after("b", 1.0)
    queue.forget("c")
    await asyncio.sleep(5.0)
    assert await ready(queue) == [], "b waits after its failure"


async def test_changed_keys_come_before_low_priority_ones_and_a_change_raises_a_key() -> None:
    queue: Queue[str] = Queue()
    queue.add_low_priority(["a", "b", "c"])
    queue.add("x")
    queue.add("b")
    assert await ready(queue) == ["x", "b", "a", "c"]


@pytest.mark.parametrize("urgent", [True, False])
async def test_no_key_is_starved_by_jobs_that_change_all_the_time(urgent: bool) -> None:
    queue: Queue[str] = Queue(monotonic=now)
    queue.add_low_priority(["low"])
    queue.add("changed")
    served = []
    for _ in range(3 * FAIR_EVERY):
        await asyncio.sleep(1.0)
        (queue.add_urgent if urgent else queue.add)("busy")
        served.append(await queue.get())
        queue.done(served[-1])
    assert "low" in served
    assert "changed" in served


async def test_a_queued_or_processed_key_keeps_its_priority() -> None:
    queue: Queue[str] = Queue()
    queue.add("processed")
    assert await queue.get() == "processed"
    queue.add("queued")
    queue.add_low_priority(["queued", "processed"])
    assert await ready(queue) == ["queued"]


async def test_a_low_priority_change_during_the_processing_of_a_key_is_not_lost() -> None:
    queue: Queue[str] = Queue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add_low_priority(["a"])
    assert await ready(queue) == []
    queue.done("a")
    assert await ready(queue) == ["a"]


async def test_regular_news_do_not_end_the_wait_of_a_failing_key() -> None:
    queue: Queue[str] = Queue()
    queue.add("a")
    await queue.get()
    queue.failed("a")
    for _ in range(5):
        queue.add_unless_failing("a")
        queue.add_news("a")
        assert await ready(queue) == []
    started_s = now()
    await queue.get()
    assert now() - started_s == pytest.approx(FIRST_BACKOFF_S)
    queue.done("a")
    queue.add_unless_failing("a")
    assert await ready(queue) == ["a"]


async def test_news_wait_for_changes() -> None:
    queue: Queue[str] = Queue()
    queue.add_news("news")
    queue.add_news("news-then-changed")
    queue.add("changed")
    queue.add("news-then-changed")
    assert await ready(queue) == ["changed", "news-then-changed", "news"]


async def test_urgent_keys_come_first_wherever_they_wait() -> None:
    queue: Queue[str] = Queue()
    queue.add_low_priority(["low", "urgent-low"])
    for key in ("a", "urgent-b"):
        queue.add(key)
    queue.add_after("urgent-later", 10.0)
    for key in ("urgent-b", "urgent-low", "urgent-later", "urgent-b"):
        queue.add_urgent(key)
    assert len(queue) == 5
    assert [await queue.get() for _ in range(3)] == ["urgent-b", "urgent-low", "urgent-later"]


async def test_a_key_that_becomes_urgent_during_its_processing_comes_first_afterwards() -> None:
    queue: Queue[str] = Queue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("b")
    queue.add("a")
    queue.add_urgent("a")
    assert len(queue) == 1, "never twice at a time"
    assert await queue.get() == "b"
    queue.add("c")
    queue.done("a")
    assert await ready(queue) == ["a", "c"]
    queue.done("a")
    assert await ready(queue) == []


@pytest.mark.parametrize("during", [False, True], ids=["before its pass", "during its pass"])
async def test_an_urgent_key_whose_pass_fails_comes_first_after_its_wait(during: bool) -> None:
    """The pass for a node that is about to end meets a conflict, and many other jobs have changed meanwhile."""
    queue: Queue[str] = Queue()
    if during:
        queue.add("a")
    else:
        queue.add_urgent("a")
    assert await queue.get() == "a"
    if during:
        queue.add_urgent("a")
    queue.failed("a")
    assert await ready(queue) == []
    queue.add("b")
    queue.add("c")
    await asyncio.sleep(FIRST_BACKOFF_S)
    assert await ready(queue) == ["a", "b", "c"]
    queue.done("a")
    queue.add("a")
    assert await queue.get() == "a"
    queue.failed("a")
    queue.add("d")
    await asyncio.sleep(FIRST_BACKOFF_S)
    assert await ready(queue) == ["d", "a"]  # the new reason was not urgent


async def test_get_urgent_leaves_all_other_keys_to_get() -> None:
    queue: Queue[str] = Queue()
    queue.add("changed")
    queue.add_low_priority(["routine"])
    waiting = asyncio.create_task(queue.get_urgent())
    await asyncio.sleep(1.0)
    assert not waiting.done()
    assert await queue.get() == "changed"
    queue.add_urgent("changed")
    await asyncio.sleep(1.0)
    assert not waiting.done(), "never twice at a time"
    queue.done("changed")
    assert await waiting == "changed"
    assert queue.is_urgent("changed")
    assert await queue.get() == "routine"
    assert not queue.is_urgent("routine")


async def test_get_urgent_is_given_a_key_whose_urgent_pass_failed() -> None:
    queue: Queue[str] = Queue()
    queue.add_urgent("a")
    queue.failed(await queue.get_urgent())
    started_s = now()
    assert await queue.get_urgent() == "a"
    assert now() - started_s == pytest.approx(FIRST_BACKOFF_S)


async def test_a_key_s_wait_counts_from_its_priority_or_the_end_of_its_processing() -> None:
    waits = list[tuple[Priority, float]]()
    queue: Queue[str] = Queue(
        waited=lambda priority, seconds: waits.append((priority, round(seconds, 6))), monotonic=now
    )
    queue.add_low_priority(["a"])
    await asyncio.sleep(1.0)
    queue.add("a")
    await asyncio.sleep(2.0)
    queue.add_urgent("a")
    await asyncio.sleep(3.0)
    queue.add("a")
    await queue.get()
    queue.add("a")
    await asyncio.sleep(4.0)
    queue.done("a")
    await asyncio.sleep(5.0)
    await queue.get()
    queue.failed("a")
    await queue.get()
    queue.done("a")
    queue.add_low_priority(["a"])
    await queue.get()
    changed = (Priority.CHANGED, 0.0)
    assert waits == [(Priority.URGENT, 3.0), (Priority.CHANGED, 5.0), changed, (Priority.ROUTINE, 0.0)]
