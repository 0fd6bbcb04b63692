"""A splice buffers little, so that the server notices a slow caller instead of counting megabytes as sent."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from noloco_p2p.net.proxy import connected
from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.tcp import BLOCK_BYTES, Splice, tune

WARM_BYTES = 64 << 20  # after this many bytes the kernel enlarges the buffers of a fast connection
COPIED_BYTES = 64 << 20
HELD_BYTES = 1536 * 1024  # two buffers of the kernel, a block, and the receive buffer of the caller


def test_a_server_gets_little_ahead_of_a_caller_that_stops_reading(tmp_path: Path) -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        server, listener = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
        server.bind(str(tmp_path / "grpc"))
        server.listen()
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        caller.connect(listener.getsockname())
        caller.setblocking(False)
        near = listener.accept()[0]
        tune(near)
        splicing = asyncio.create_task(
            Splice(near, connected(tmp_path / "grpc", own_path=tmp_path / "7")).run(), name="splice"
        )
        far, peer = server.accept()
        assert peer == str(tmp_path / "7")  # the server identifies the connection by this name
        far.setblocking(False)
        num_sent = num_read = 0

        async def send() -> None:
            nonlocal num_sent
            block = bytes(BLOCK_BYTES)
            while True:
                await loop.sock_sendall(far, block)
                num_sent += len(block)

        sending = asyncio.create_task(send())
        while num_read < WARM_BYTES:
            num_read += len(await loop.sock_recv(caller, BLOCK_BYTES))
        before = -1
        while before != num_sent:  # until the server is blocked
            before = num_sent
            await asyncio.sleep(0.3)
        sending.cancel()
        await end_tasks([splicing])
        for each in (server, listener, caller, far):
            each.close()
        return num_sent - num_read

    assert asyncio.run(run()) < HELD_BYTES
    assert not (tmp_path / "7").exists()


def test_copies_on_several_threads_do_not_mix() -> None:
    """Each peer of a process has its own thread. Reading and sending release the GIL."""

    async def copy(pattern: bytes) -> bool:
        loop = asyncio.get_running_loop()
        (caller, near), (far, server) = socket.socketpair(), socket.socketpair()
        for each in (caller, near, far, server):
            each.setblocking(False)
        splicing = asyncio.create_task(Splice(near, far).run())
        sending = asyncio.create_task(loop.sock_sendall(caller, pattern * COPIED_BYTES))
        left, is_same = COPIED_BYTES, True
        while left:
            data = await loop.sock_recv(server, BLOCK_BYTES)
            is_same &= data == pattern * len(data)
            left -= len(data)
        await end_tasks([sending, splicing])
        for each in (caller, server):
            each.close()
        return is_same

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda pattern: asyncio.run(copy(pattern)), [b"a", b"b", b"c"]))
