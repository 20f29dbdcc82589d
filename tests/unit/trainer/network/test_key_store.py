"""The store of a formation: gloo groups meet in it, and its end wakes everybody who waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from heterotrain.network.connection_setup import c10d, gloo_group
from heterotrain.network.gloo.abort import open_sockets
from heterotrain.network.gloo.listeners import GuardedDevices
from heterotrain.network.key_store import KeyStore, KeyTable, serve
from support.waiting import UNLIMITED_S


@contextlib.contextmanager
def stores(ranks: int) -> Iterator[tuple[KeyTable, list[KeyStore]]]:
    """Yield a table with the views of all ranks, which a loop in a thread serves."""
    loop = asyncio.new_event_loop()
    table, pairs = KeyTable(loop), [socket.socketpair() for _ in range(ranks)]

    async def answer(one: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=one)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await serve(table, reader, writer)
        writer.close()

    async def stop() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    served = [asyncio.run_coroutine_threadsafe(answer(one), loop) for one, _ in pairs]
    views = [KeyStore(other, limit_s=UNLIMITED_S) for _, other in pairs]
    try:
        yield table, views
    finally:
        table.close()
        for each in views:
            each.close()
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        assert all(each.done() for each in served)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_every_rank_reads_what_every_rank_has_set() -> None:
    """Whoever asks first waits; each value arrives once, in whatever order it is read."""
    with stores(3) as (_table, views), ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(view.get, "late") for view in views[:2]]
        views[2].set("early", b"\0e")
        views[2].set("late", "text")
        assert [each.result() for each in waiting] == [b"text"] * 2
        assert views[2].get("late") == b"text"
        assert [view.get("early") for view in views] == [b"\0e"] * 3


def test_the_end_of_the_table_wakes_all_who_wait() -> None:
    """On the hosting rank and on others: a formation that was given up holds nobody."""
    with stores(2) as (table, views), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(view.get, "never") for view in views]
        table.close()
        for each in waiting:
            with pytest.raises(OSError, match=r"given up|ended"):
                each.result()


def test_a_cut_wakes_the_rank_itself() -> None:
    """A rank that gives up its formation does not wait for the host."""
    with stores(2) as (_table, views), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(views[1].get, "never")
        views[1].cut()
        with pytest.raises(OSError, match=r"ended|Bad file|shutdown|pipe"):
            waiting.result()


def test_gloo_groups_meet_in_the_store_and_then_take_no_connection() -> None:
    """A stranger's connection is dropped by the kernel: gloo would keep its descriptor for ever, and abort at 1,024."""
    before = open_sockets()
    with stores(3) as (_table, views), ThreadPoolExecutor(3) as pool:
        made = [pool.submit(gloo_group, view, "g", rank=rank, world_size=3) for rank, view in enumerate(views)]
        groups = [each.result() for each in made]
        values = [torch.full((4,), float(rank)) for rank in range(3)]
        works = [group.allreduce([value], c10d.AllreduceOptions()) for group, value in zip(groups, values, strict=True)]
        for work in works:
            work.wait()
        assert all(value.tolist() == [3.0] * 4 for value in values)
        listening = ports_of(open_sockets() - before)
        assert len(listening) == 3
        for address in listening:
            with pytest.raises(TimeoutError), socket.create_connection(address, 0.3):
                pass
        del groups, works


def ports_of(candidates: frozenset[object]) -> list[tuple[str, int]]:
    """Return the addresses of the listening sockets among these."""
    found = []
    for each in candidates:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.descriptor)) as one:  # type: ignore[attr-defined]  # a private connection
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(one.getsockname()[:2])
    return found


def test_a_device_still_takes_connections_while_its_group_is_made() -> None:
    """Only the end of the context closes the port."""
    before = open_sockets()
    guard = GuardedDevices()
    with guard:
        (address,) = ports_of(open_sockets() - before)
        socket.create_connection(address, 5).close()
    with pytest.raises(TimeoutError), socket.create_connection(address, 0.3):
        pass
