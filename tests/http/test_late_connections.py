"""What conftest changes in asyncio: a connection that a server accepts while it closes is closed too."""

from __future__ import annotations

import asyncio
import gc
import socket


def test_a_connection_accepted_while_its_server_closes_is_not_left_to_the_garbage_collector() -> None:
    async def accept_and_close() -> bytes:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, server.close)
            for _ in range(4):
                await asyncio.sleep(0)
            client.settimeout(20)
            return client.recv(1)

    assert asyncio.run(accept_and_close()) == b""
    gc.collect()  # raises what pytest makes of a socket that was not closed
