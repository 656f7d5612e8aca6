"""What the supervisor and the processes it starts tell each other, over an inherited socket: framed, typed, no pickle.

The first message to a child says what to do (EngineStart, EdgeStart or FetchStart). The end of the stream means that
the other side is gone: the supervisor restarts a child that hangs up, and a child without a supervisor exits.
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
    """To an engine, first: load this, then listen at `address`. `directory` is private to the server."""

    config: ServerConfig
    generation: int  # counts engines since the server started, from 1
    address: str
    directory: str
    adapters: tuple[AdapterModule, ...] = ()  # LoRA adapters that clients loaded into the engine before it


class EdgeStart(msgspec.Struct, frozen=True, tag="edge_start"):
    """To an edge, first: serve the inherited listening socket `listen_fd`, and that for admin where there is one.

    `edge` is never used twice; `seat`, from 0, is that of the edge it replaces.
    """

    config: ServerConfig
    edge: int
    listen_fd: int
    directory: str
    seat: int = 0
    admin_fd: int | None = None


class FetchStart(msgspec.Struct, frozen=True, tag="fetch_start"):
    """To the process that downloads models, first: download what `config` names. Until Stop, answer every connection
    to the inherited listening sockets with 503."""

    config: ServerConfig
    listen_fds: tuple[int, ...]


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """From the process that downloads models: the configuration, with the paths of the files."""

    config: ServerConfig


class ReplicaStart(msgspec.Struct, frozen=True, tag="replica_start"):
    """To one of several servers behind a router, first: serve `config`, with keys from these sources."""

    config: ServerConfig
    keys: KeySources


class ReplicaReady(msgspec.Struct, frozen=True, tag="replica_ready"):
    """From one of several servers behind a router: it takes requests."""


class LoadProgress(msgspec.Struct, frozen=True, tag="load_progress"):
    """From a process that downloads or loads a model: how far a phase is, in [0, 1]."""

    phase: str
    share: float


class EngineUp(msgspec.Struct, frozen=True, tag="engine_up"):
    """From an engine: it takes requests at `address`. Passed on to every edge, also to one that starts later."""

    ready: EngineReady
    address: str
    progress: str = ""  # the file of its ProgressRecord; "": there is none


class EngineDown(msgspec.Struct, frozen=True, tag="engine_down"):
    """To the edges: the engine is gone and all that was in it is lost."""

    reason: str


class AdaptersNow(msgspec.Struct, frozen=True, tag="adapters_now"):
    """From an engine: the LoRA adapters that it has. The next engine loads them again."""

    adapters: tuple[AdapterModule, ...]


class EdgeGone(msgspec.Struct, frozen=True, tag="edge_gone"):
    """To the engine: an edge process ended; its requests have nobody to answer to."""

    edge: int


class EdgeStuck(msgspec.Struct, frozen=True, tag="edge_stuck"):
    """From the engine: an edge reads nothing; its requests were ended and it must be replaced."""

    edge: int


class EdgeReady(msgspec.Struct, frozen=True, tag="edge_ready"):
    """From an edge: it accepts connections. The engine may still be loading."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """To an edge: answer with Pong from your event loop, so that the supervisor knows that it runs."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """From an edge: its event loop has read a Ping."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To an edge: take no new work, finish what runs within `seconds`, say Drained and exit."""

    seconds: float


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """From an edge: nothing runs in it any more."""


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """To an edge: use these keys from now on, and read the certificate's files again."""

    access: AccessConfig


class AskDrain(msgspec.Struct, frozen=True, tag="ask_drain"):
    """From an edge, for an admin: shut the whole server down as SIGTERM would."""


class AskAbort(msgspec.Struct, frozen=True, tag="ask_abort"):
    """From an edge, for an admin, and passed on to all other edges: end these requests (the engine's ids), or all."""

    request_ids: tuple[str, ...] | None


class AskEdges(msgspec.Struct, frozen=True, tag="ask_edges"):
    """From an edge, for an admin, and passed on to all other edges: what do you look after?"""

    asker: int
    number: int


class RequestRow(msgspec.Struct, frozen=True):
    """One live request at an edge. `name` is what its client calls it, `answer_id` what its answer is called."""

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


class EdgeAnswer(msgspec.Struct, frozen=True, tag="edge_answer"):
    """From an edge, and passed on to the one that asked: all that waits or runs here."""

    asker: int
    number: int
    requests: tuple[RequestRow, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """To the engine, or to the process that downloads models: end what is left and exit."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """From a child, last: why it cannot go on, in one line. `retry` is false when another start would end the same."""

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
    """The other side of a control socket sent what is no control message."""


def pack(message: ControlMessage) -> bytes:
    """A message as it travels: four bytes of length, then msgpack."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise BadControl(f"a control message of {len(body)} bytes is above the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Cuts a byte stream into messages. Raises BadControl on what cannot be one; the stream is then of no more use."""

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
    """A child's end of its control socket. `send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unpacker = Unpacker()
        self._pending: list[ControlMessage] = []
        self._sending = threading.Lock()

    @classmethod
    def inherited(cls, fd: int) -> ControlChannel:
        """The channel whose number the supervisor gave on the command line. Not passed on to further children."""
        connection = socket.socket(fileno=fd)
        connection.set_inheritable(False)
        connection.setblocking(True)
        return cls(connection)

    def fileno(self) -> int:
        """For polling. `receive` blocks only while `has_pending` is false and nothing is readable."""
        return self._socket.fileno()

    @property
    def has_pending(self) -> bool:
        """Messages are here already that polling the socket would not show."""
        return bool(self._pending)

    def send(self, message: ControlMessage) -> None:
        """Blocks while the socket is full. A supervisor that is gone is not an error here: `receive` tells."""
        with self._sending:
            try:
                self._socket.sendall(pack(message))
            except (BrokenPipeError, ConnectionResetError):
                return

    def receive(self) -> ControlMessage | None:
        """The next message; None when the supervisor is gone. Raises BadControl."""
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
