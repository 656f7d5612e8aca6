"""The messages between the supervisor and its child processes, over an inherited socket.

A message is a length and typed msgpack data. The first message to a child is its job (EngineStart, EdgeStart or
FetchStart). The end of the stream means that the other process has ended: the supervisor restarts a child that closes
its socket, and a child without a supervisor exits.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import msgspec

from quire.config.adapters import AdapterModule
from quire.config.keys import KeySources
from quire.config.server import AccessConfig, ServerConfig
from quire.serving.process.link import EngineReady
from quire.types.errors import QuireError

MAX_FRAME = 64 * 2**20
_LENGTH = struct.Struct("<I")
_READ = 2**16


class EngineStart(msgspec.Struct, frozen=True, tag="engine_start"):
    """To an engine, first: load the model, then listen at `address`. `directory` is private to the server."""

    config: ServerConfig
    generation: int  # number of this engine since the server's start, from 1
    address: str
    directory: str
    adapters: tuple[AdapterModule, ...] = ()  # LoRA adapters that clients had loaded into the previous engine


class EdgeStart(msgspec.Struct, frozen=True, tag="edge_start"):
    """To an edge, first: serve the inherited listening socket `listen_fd`, and `admin_fd` if there is one.

    `edge` is unique among all edges of the server. `seat` is the edge's place, from 0; an edge that replaces another
    has its seat.
    """

    config: ServerConfig
    edge: int
    listen_fd: int
    directory: str
    seat: int = 0
    admin_fd: int | None = None


class FetchStart(msgspec.Struct, frozen=True, tag="fetch_start"):
    """To the process that downloads models, first: download the models in `config`. Until Stop, answer every connection
    to the inherited listening sockets with 503."""

    config: ServerConfig
    listen_fds: tuple[int, ...]


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """From the process that downloads models: the configuration, with the paths of the downloaded files."""

    config: ServerConfig


class ReplicaStart(msgspec.Struct, frozen=True, tag="replica_start"):
    """To one of several servers behind a router, first: serve `config`, with keys from these sources."""

    config: ServerConfig
    keys: KeySources


class ReplicaReady(msgspec.Struct, frozen=True, tag="replica_ready"):
    """From one of several servers behind a router: it takes requests."""


class LoadProgress(msgspec.Struct, frozen=True, tag="load_progress"):
    """From a process that downloads or loads a model: the completed share of a phase, in [0, 1]."""

    phase: str
    share: float


class EngineUp(msgspec.Struct, frozen=True, tag="engine_up"):
    """From an engine: it takes requests at `address`. Forwarded to every edge, also to edges that start later."""

    ready: EngineReady
    address: str
    progress: str = ""  # path of its ProgressRecord; "": none


class EngineDown(msgspec.Struct, frozen=True, tag="engine_down"):
    """To the edges: the engine has ended, and all its requests are lost."""

    reason: str


class AdaptersNow(msgspec.Struct, frozen=True, tag="adapters_now"):
    """From an engine: its current LoRA adapters. The next engine loads them again."""

    adapters: tuple[AdapterModule, ...]


class EdgeGone(msgspec.Struct, frozen=True, tag="edge_gone"):
    """To the engine: an edge process has ended. Its requests are aborted."""

    edge: int


class EdgeStuck(msgspec.Struct, frozen=True, tag="edge_stuck"):
    """From the engine: an edge does not read its messages. Its requests have been aborted, and it must be replaced."""

    edge: int


class EdgeReady(msgspec.Struct, frozen=True, tag="edge_ready"):
    """From an edge: it accepts connections. The engine may still be loading."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """To an edge: answer with Pong from the event loop, which shows that it runs."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """From an edge: its event loop has handled a Ping."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To an edge: take no new requests, finish the running ones within `seconds`, send Drained and exit."""

    seconds: float


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """From an edge: it has no more requests."""


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """To an edge: use these keys from now on, and read the certificate files again."""

    access: AccessConfig


class AskDrain(msgspec.Struct, frozen=True, tag="ask_drain"):
    """From an edge, on behalf of an admin: shut the whole server down, like SIGTERM."""


class AskAbort(msgspec.Struct, frozen=True, tag="ask_abort"):
    """From an edge, on behalf of an admin, and forwarded to all other edges: abort these requests (by the engine's
    ids), or all."""

    request_ids: tuple[str, ...] | None


class AskEdges(msgspec.Struct, frozen=True, tag="ask_edges"):
    """From an edge, on behalf of an admin, and forwarded to all other edges: send an EdgeAnswer with your live
    requests."""

    asker: int
    number: int


class RequestRow(msgspec.Struct, frozen=True):
    """One live request at an edge. `name` is the client's id for it, `answer_id` the id of its response."""

    request_id: str
    name: str
    answer_id: str
    edge: int
    endpoint: str
    state: str
    age_seconds: float
    prompt_tokens: int
    n: int
    stream: bool

    @property
    def ids(self) -> tuple[str, str, str]:
        """All ids by which an operator may name the request."""
        return self.request_id, self.answer_id, self.name


class EdgeAnswer(msgspec.Struct, frozen=True, tag="edge_answer"):
    """From an edge, and forwarded to the one that asked: its waiting and running requests."""

    asker: int
    number: int
    requests: tuple[RequestRow, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """To the engine, or to the process that downloads models: finish and exit."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """From a child, last: why it cannot continue, in one line. `retry` is false if another start would fail in the same
    way."""

    reason: str
    retry: bool = True


ControlMessage = (
    EngineStart
    | EdgeStart
    | FetchStart
    | Fetched
    | ReplicaStart
    | ReplicaReady
    | LoadProgress
    | EngineUp
    | EngineDown
    | AdaptersNow
    | EdgeGone
    | EdgeStuck
    | EdgeReady
    | Ping
    | Pong
    | Drain
    | Drained
    | Reload
    | AskDrain
    | AskAbort
    | AskEdges
    | EdgeAnswer
    | Stop
    | Fatal
)

_DECODER: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)


class BadControl(QuireError):
    """The other side of a control socket sent something that is not a control message."""


def pack(message: ControlMessage) -> bytes:
    """Encode a message: four bytes of length, then msgpack."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise BadControl(f"a control message of {len(body)} bytes is above the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Splits a byte stream into messages. Raises BadControl for invalid data; after that the stream cannot be used."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[ControlMessage]:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise BadControl(f"a control message of {length} bytes is above the limit of {MAX_FRAME}")
            if len(self._buffer) < _LENGTH.size + length:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            try:
                yield _DECODER.decode(body)
            except msgspec.DecodeError as error:
                raise BadControl(f"not a control message: {error}") from None


class ControlChannel:
    """A child's end of its control socket. `send` is thread-safe; `receive` must be called from one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unpacker = Unpacker()
        self._pending: list[ControlMessage] = []
        self._sending = threading.Lock()

    @classmethod
    def inherited(cls, fd: int) -> ControlChannel:
        """Return the channel of a file descriptor inherited from the supervisor. It is not inherited by further
        children."""
        connection = socket.socket(fileno=fd)
        connection.set_inheritable(False)
        connection.setblocking(True)
        return cls(connection)

    def fileno(self) -> int:
        """Return the file descriptor, for polling. `receive` blocks only if `has_pending` is false and nothing is
        readable."""
        return self._socket.fileno()

    @property
    def has_pending(self) -> bool:
        """Whether messages have been read already, so that polling the socket would not show them."""
        return bool(self._pending)

    def send(self, message: ControlMessage) -> None:
        """Send a message; blocks while the socket is full. If the supervisor is gone, does nothing: `receive` returns
        None then."""
        with self._sending:
            try:
                self._socket.sendall(pack(message))
            except (BrokenPipeError, ConnectionResetError):
                return

    def receive(self) -> ControlMessage | None:
        """Return the next message, or None if the supervisor is gone. Raises BadControl."""
        while not self._pending:
            try:
                data = self._socket.recv(_READ)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._pending.extend(self._unpacker.feed(data))
        return self._pending.pop(0)

    def close(self) -> None:
        self._socket.close()
