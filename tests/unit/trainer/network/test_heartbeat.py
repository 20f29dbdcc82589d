"""Heartbeat connections to a peer in this process."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from heterotrain.network.authentication import Credentials, authenticate_streams, peer_role
from heterotrain.network.frames import read_frame, write_frame
from heterotrain.network.heartbeat import Heartbeats, key_of
from heterotrain_core.contract.plan import Rank


async def connected(*, timeout_s: float) -> int:
    """Return the kernel's limit for unacknowledged data, in milliseconds, on a heartbeat connection that is up."""
    opened: list[Any] = []
    connect = asyncio.open_connection

    async def recording(*where: Any, **options: Any) -> Any:
        reader, writer = await connect(*where, **options)
        opened.append(writer.get_extra_info("socket"))
        return reader, writer

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await authenticate_streams(reader, writer, Credentials(secret=b""), role=peer_role("u0", 0), listens=True)
        while await read_frame(reader):
            await write_frame(writer, {"fine": True})

    async def ignore(_peer: Rank, _reply: Any) -> None:
        return

    changed = asyncio.Event()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    peer = Rank(
        rank=0, member=0, worker="w0", worker_uid="u0", address="127.0.0.1",
        peer_port=server.sockets[0].getsockname()[1], on_demand=True,
    )  # fmt: skip
    beats = Heartbeats(
        timeout_s=timeout_s,
        message=lambda _member: {"op": "beat"},
        on_reply=ignore,
        changed=changed,
        credentials=Credentials(secret=b""),
    )
    asyncio.open_connection = recording  # type: ignore[assignment]  # a deliberate wrapper
    try:
        beats.watch({key_of(peer): peer})
        await asyncio.wait_for(changed.wait(), 60)
        assert beats.is_up(key_of(peer))
        return int(opened[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    finally:
        asyncio.open_connection = connect
        beats.watch({})
        server.close()


def test_the_kernel_ends_a_connection_whose_host_is_silent_for_the_time_limit() -> None:
    """Without this limit a silent host shows only as a process without answers, four times later."""
    assert asyncio.run(connected(timeout_s=2.5)) == 2500
