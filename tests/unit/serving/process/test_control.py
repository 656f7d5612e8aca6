"""Control messages arrive whole, in order, or the stream is known to be bad."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.arguments import EngineArguments
from quire.config.server import AccessConfig, ModelSource, ServerConfig
from quire.serving.process.control import (
    MAX_FRAME,
    AskAbort,
    AskDrain,
    AskEdges,
    BadControl,
    ControlChannel,
    ControlMessage,
    Drain,
    EdgeAnswer,
    EdgeGone,
    EdgeStart,
    EngineDown,
    EngineStart,
    EngineUp,
    Fatal,
    LoadProgress,
    RequestRow,
    Unpacker,
    pack,
)
from quire.serving.process.link import EngineReady

CONFIG = ServerConfig(
    source=ModelSource(model="/models/x.gguf", served_names=("x", "y"), chat_template="{{ messages }}"),
    engine=EngineArguments(kv_cache_memory="1GiB", max_num_seqs=4),
    access=AccessConfig(key_digests=("ab",)),
    limits={"n": 4},
    log_format="json",
)
READY = EngineReady(2, 100, 97, 8, 4, 64, "float32", "cpu", "fcfs", (1, 2))
MESSAGES: list[ControlMessage] = [
    EngineStart(CONFIG, 1, "ipc:///x/engine-1", "/x"),
    EdgeStart(CONFIG, 3, 9, "/x"),
    LoadProgress("reading weights", 0.5),
    EngineUp(READY, "ipc:///x/engine-2"),
    EngineDown("it was killed"),
    EdgeGone(4),
    Drain(30.0),
    AskDrain(),
    AskAbort(("a", "b")),
    AskEdges(1, 7),
    EdgeAnswer(1, 7, (RequestRow("cmpl-a~1", "a", "cmpl-a", 2, "chat", "queued", 0.5, 3, 1, True),)),
    AskAbort(None),
    Fatal("no such file", retry=False),
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, ControlChannel]]:
    ours, theirs = socket.socketpair()
    channel = ControlChannel(theirs)
    yield ours, channel
    ours.close()
    channel.close()


@given(st.lists(st.integers(1, 600), min_size=1))
def test_messages_survive_any_cut_of_the_stream(cuts: list[int]) -> None:
    stream = b"".join(map(pack, MESSAGES))
    unpacker, found, start = Unpacker(), list[ControlMessage](), 0
    for cut in [*cuts, len(stream)]:
        found.extend(unpacker.feed(stream[start : start + cut]))
        start += cut
    assert found == MESSAGES


def test_a_channel_hands_out_messages_in_order_and_then_the_end(ends: tuple[socket.socket, ControlChannel]) -> None:
    ours, channel = ends
    ours.sendall(b"".join(map(pack, MESSAGES)))
    ours.shutdown(socket.SHUT_WR)
    assert [channel.receive() for _ in MESSAGES] == MESSAGES
    assert channel.receive() is None


def test_what_was_read_together_is_pending(ends: tuple[socket.socket, ControlChannel]) -> None:
    ours, channel = ends
    ours.sendall(pack(Drain(1.0)) + pack(AskDrain()))
    assert not channel.has_pending
    assert channel.receive() == Drain(1.0)
    assert channel.has_pending
    assert channel.receive() == AskDrain()


def test_sending_to_a_supervisor_that_is_gone_is_no_error(ends: tuple[socket.socket, ControlChannel]) -> None:
    ours, channel = ends
    ours.close()
    channel.send(AskDrain())
    assert channel.receive() is None


@pytest.mark.parametrize("body", [b"\xc1", b"\x01", b"\x81\xa4type\xa4what"])
def test_a_frame_that_is_no_message_is_an_error(body: bytes) -> None:
    with pytest.raises(BadControl, match="not a control message"):
        list(Unpacker().feed(struct.pack("<I", len(body)) + body))


def test_a_frame_above_the_limit_is_an_error_before_it_is_read() -> None:
    with pytest.raises(BadControl, match="above the limit"):
        list(Unpacker().feed(struct.pack("<I", MAX_FRAME + 1)))
