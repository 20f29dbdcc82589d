"""The ranks waited for follow from the reported activities of all ranks."""

from __future__ import annotations

import threading
from dataclasses import replace

from heterotrain.network.hang import Activity, explain, from_reply, stack_of, to_reply

OWN = Activity(rank=0, name="w0/0", steps=7, waits_for="gradient bucket 2 of 3", waits_s=31.4, stack=("  in own",))
SAME = replace(OWN, rank=1, name="w1/0", stack=())
STUCK = Activity(rank=2, name="w2/0", steps=7, stack=('  File "train.py", line 3, in load',))
SILENT = Activity(rank=3, name="w3/0", answers=False)


def first_line(*peers: Activity) -> str:
    """Return the first line of the log entry of rank 0."""
    return explain(OWN, peers).splitlines()[0].partition("; ")[2]


def test_ranks_that_do_not_wait_are_waited_for() -> None:
    """A rank in code of its own, with its stack, and a rank that does not answer."""
    text = explain(OWN, [SAME, STUCK, SILENT])
    assert text.splitlines() == [
        "step 7 has waited 31 s for gradient bucket 2 of 3; waited for: rank 2 (w2/0), rank 3 (w3/0)",
        "rank 1 (w1/0) has waited 31 s for gradient bucket 2 of 3 of step 7",
        "rank 2 (w2/0) runs code of its own, at step 7:",
        '  File "train.py", line 3, in load',
        "rank 3 (w3/0) does not answer",
        "rank 0 (w0/0) waits here:",
        "  in own",
    ]


def test_ranks_that_wait_for_different_things() -> None:
    """A branch that only some ranks take: the others are named; no rank is when all wait for the same."""
    assert first_line(SAME, replace(SAME, rank=2, name="w2/0", waits_for="an all-gather of numbers")) == (
        "waited for: rank 2 (w2/0)"
    )
    assert first_line(SAME) == "waited for: no rank in particular, because all ranks wait for the same"
    assert first_line() == "waited for: unknown, because ranks without an operator cannot ask each other"


def test_replies_about_activities() -> None:
    """A stack is sent only by a rank that does not wait; a malformed reply counts as no answer."""
    assert from_reply(2, "w2/0", to_reply(STUCK)) == STUCK
    assert from_reply(1, "w1/0", to_reply(replace(SAME, stack=("  in wait",)))) == SAME
    assert from_reply(3, "w3/0", None) == from_reply(3, "w3/0", {"steps": "many"}) == SILENT


def test_the_stack_of_another_thread() -> None:
    """Its innermost frames show where it waits; a thread that has ended has none."""
    begun, release = threading.Event(), threading.Event()

    def stuck_here() -> None:
        begun.set()
        release.wait()

    thread = threading.Thread(target=stuck_here, daemon=True)
    thread.start()
    begun.wait()
    assert any("in stuck_here" in frame for frame in stack_of(thread.ident))
    release.set()
    thread.join()
    assert stack_of(thread.ident) == ()
