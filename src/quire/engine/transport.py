"""The sockets between edges and the engine process: local ZeroMQ sockets that only this user can open."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import zmq

from quire.engine.command_messages import CommandAnswer
from quire.engine.messages import (
    MAX_MESSAGE,
    AdapterAnswer,
    BadMessage,
    FromEngine,
    Lost,
    Refused,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from quire.types.output import Finished, TokensOut

logger = logging.getLogger("quire.engine")

_IPC = "ipc://"
_FLUSH_MS = 500  # how long `close` waits for the last messages to be sent
_MAX_UNREAD = 4_096  # batches an edge may leave unread before it counts as stuck
_UNSAID = "what the engine says of it cannot be sent"
_MAX_UNSENT = 65_536  # batches an edge may send while the engine is in a long step


class EngineSocket:
    """The engine's socket. Every edge connects to it with its number as identity. Only one thread may use it."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_UNREAD)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_UNSENT)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE)
        self._socket.bind(address)
        Path(address.removeprefix(_IPC)).chmod(0o600)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def wait(self, wake_fd: int, seconds: float | None = None) -> bool:
        """Block until a message arrives, `wake_fd` becomes readable, or `seconds` have passed (in whole milliseconds).

        Returns False on timeout.
        """
        self._poller.register(wake_fd, zmq.POLLIN)
        ready = self._poller.poll(None if seconds is None else int(seconds * 1e3))
        self._poller.unregister(wake_fd)
        return bool(ready)

    def receive(self) -> Iterator[tuple[int, ToEngine]]:
        """Yield the messages that have arrived, as (edge, message). Never blocks; logs and skips malformed ones."""
        while _has_message(self._socket):
            sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if not sender.isdigit():
                logger.warning("dropped a message: its sender is no edge of this server")
                continue
            for frame in frames:
                try:
                    message = decode_to_engine(frame)
                except BadMessage as error:
                    logger.warning("dropped a message of edge %d: %s", int(sender), error)
                    if error.submit_id is not None:  # the edge waits for an answer to it
                        reason = "cannot be read by the engine"
                        self.send(int(sender), [Refused(error.submit_id, error.field, reason, "check this field")])
                    continue
                yield int(sender), message

    def send(self, edge: int, messages: Sequence[FromEngine]) -> bool:
        """Send messages to an edge as one batch. Returns False if the edge is gone or its queue is full. A message that
        cannot be encoded is split. A part that still cannot be encoded is logged; if it is the end of a request, an
        error is sent in its place."""
        frames = [frame for message in messages for frame in _frames(message)]
        if not frames:
            return True
        try:
            self._socket.send_multipart([b"%d" % edge, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self) -> None:
        """Wait briefly until the last messages are sent, then close. Idempotent."""
        self._socket.close(linger=_FLUSH_MS)
        self._context.term()


class EdgeSocket:
    """An edge's socket to one engine. Only one thread may use it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], edge: int, address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, b"%d" % edge)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE)
        self._socket.connect(address)

    @property
    def pollable(self) -> zmq.Socket[bytes]:
        """The raw socket, for use in a poller only."""
        return self._socket

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send encoded messages as one batch. Returns False if the engine's queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[FromEngine]:
        """Yield the messages that have arrived. Never blocks; logs and skips malformed ones."""
        while _has_message(self._socket):
            for frame in self._socket.recv_multipart(zmq.NOBLOCK):
                try:
                    message = decode_from_engine(frame)
                except BadMessage as error:
                    logger.warning("dropped a message of the engine: %s", error)
                    continue
                yield message

    def close(self, *, flush: bool) -> None:
        self._socket.close(linger=_FLUSH_MS if flush else 0)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _frames(message: FromEngine) -> list[bytes]:
    """Return the frames of a message, or of its parts if it cannot be encoded as a whole. A part that cannot be encoded
    is logged, and replaced by the message that `_instead` returns, if any."""
    try:
        return [encode(message)]
    except BadMessage as error:
        if isinstance(message, TokensOut) and (parts := _halves(message)):
            return [frame for part in parts for frame in _frames(part)]
        logger.error("%s of the engine: %s", type(message).__name__, error)
    instead = _instead(message)
    try:
        return [] if instead is None else [encode(instead)]
    except BadMessage:
        return []


def _halves(message: TokensOut) -> tuple[TokensOut, ...]:
    """Split a message in two: tokens and ends, or else half of its samples or half of its ends. Empty if it has only
    one sample or one end."""
    if (len(message.samples) or message.best) and message.finished:
        no_tokens = TokensOut(message.step, message.samples[:0], message.token_ids[:0], finished=message.finished)
        return replace(message, finished=()), no_tokens
    handles = sorted({*message.samples.tolist(), *(handle for handle, _ in message.best)})
    if len(handles) > 1:
        middle = handles[len(handles) // 2]
        return _below(message, middle, True), _below(message, middle, False)
    half = len(message.finished) // 2
    ends = message.finished[:half], message.finished[half:]
    return tuple(replace(message, finished=each) for each in ends) if half else ()


def _below(message: TokensOut, middle: int, is_below: bool) -> TokensOut:
    """Return the part of a message without ends that is about samples with handles below `middle`, or about the
    others."""
    own = (message.samples < middle) == is_below
    return TokensOut(
        message.step, message.samples[own], message.token_ids[own],
        logprobs=tuple(each for each in message.logprobs if (each[0] < middle) == is_below),
        best=tuple(each for each in message.best if (each[0] < middle) == is_below),
    )  # fmt: skip


def _instead(message: FromEngine) -> FromEngine | None:
    """Return the message to send when `message` cannot be encoded, so that the edge learns that its requests have
    ended. None for answers about the engine itself, for which edges time out."""
    if isinstance(message, Refused):
        return Refused(message.request_id, "request", f"was refused, and {_UNSAID}", "see the log of the engine")
    if isinstance(message, Lost):
        return Lost(f"the engine failed, and {_UNSAID}")
    if isinstance(message, AdapterAnswer):
        return AdapterAnswer(message.number, None, "lora_name", f"the answer is lost: {_UNSAID}")
    if isinstance(message, CommandAnswer):
        return CommandAnswer(message.number, None, reason=f"the command failed, and {_UNSAID}")
    if not isinstance(message, TokensOut) or not message.finished:
        return None
    (end,) = message.finished
    return replace(message, finished=(Finished(end.request_id, (), error=f"the answer is lost: {_UNSAID}"),))
