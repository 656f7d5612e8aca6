"""The KV transport over shared memory: what is put is got, whole and by the right engines only; nobody reads half a
block, also if its writer is killed; the last owner removes everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.config.parallel import NO_PARALLEL, ParallelConfig
from quire.runtime.transport import shared_memory
from quire.runtime.transport.base import TransportError
from quire.runtime.transport.sealed import SEAL_BYTES, layout_digest
from quire.runtime.transport.shared_memory import SharedMemoryTransport
from quire.types.errors import ConfigError

SIZE = 1000
ONE = NO_PARALLEL.place(0)
LAYOUT = layout_digest("00", "torch.float32", (2, 4), ONE)
LATER = time.monotonic() + 3600.0


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    return tmp_path


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int) -> memoryview:
    return memoryview(bytes((number + at) % 256 for at in range(SIZE)))


def make(num_blocks: int = 100, layout: bytes = LAYOUT) -> SharedMemoryTransport:
    return SharedMemoryTransport("test", num_blocks * (SIZE + SEAL_BYTES), layout, SIZE)


def folder(root: Path) -> Path:
    return root / f"quire-kv-{os.geteuid()}-test"


def got(transport: SharedMemoryTransport, number: int) -> bytes:
    data = bytearray(SIZE)
    transport.get(key(number), memoryview(data), LATER)
    return bytes(data)


def test_a_block_that_one_engine_puts_another_gets() -> None:
    one, other = make(), make()
    for number in range(5):
        one.put(key(number), block(number), LATER)
    assert other.has([key(3), key(9), key(0)], LATER) == {key(3), key(0)}
    assert [got(other, number) for number in range(5)] == [bytes(block(number)) for number in range(5)]
    with pytest.raises(TransportError, match="shm://test no longer has the block") as raised:
        got(other, 9)
    assert raised.value.reason == "missing"
    one.close()
    other.close()


def test_the_last_owner_removes_everything(root: Path) -> None:
    one, other = make(), make()
    one.put(key(1), block(1), LATER)
    one.close()
    assert got(other, 1) == bytes(block(1))
    other.close()
    other.close()
    assert list(root.iterdir()) == []
    again = make()
    assert again.has([key(1)], LATER) == set()
    again.close()


@pytest.mark.parametrize("place", [0, 10, 20, 60, 80, SEAL_BYTES, SEAL_BYTES + SIZE - 1])
def test_a_changed_byte_is_detected_and_the_block_dropped(place: int, root: Path) -> None:
    transport = make()
    transport.put(key(1), block(1), LATER)
    path = folder(root) / key(1).hex()
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(TransportError, match=r"a block of shm://test|shm://test does not match") as raised:
        got(transport, 1)
    assert raised.value.reason == "corrupt"
    assert transport.has([key(1)], LATER) == set()
    transport.close()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_block_of_another_size_is_dropped(change: int, root: Path) -> None:
    transport = make()
    transport.put(key(1), block(1), LATER)
    path = folder(root) / key(1).hex()
    path.write_bytes((path.read_bytes() + b"x")[: SEAL_BYTES + SIZE + change])
    with pytest.raises(TransportError, match="another size"):
        got(transport, 1)
    transport.close()


@pytest.mark.parametrize(
    "layout",
    [
        layout_digest("01", "torch.float32", (2, 4), ONE),
        layout_digest("00", "torch.int8", (2, 4), ONE),
        layout_digest("00", "torch.float32", (4, 2), ONE),
        layout_digest("00", "torch.float32", (2, 4), ParallelConfig(2).place(0)),
        layout_digest("00", "torch.float32", (2, 4), ParallelConfig(2).place(1)),
        layout_digest("00", "torch.float32", (2, 4), ParallelConfig(1, 2).place(1)),
    ],
)
def test_a_block_of_another_model_layout_or_rank_is_not_read(layout: bytes) -> None:
    one, other = make(), make(layout=layout)
    one.put(key(1), block(1), LATER)
    with pytest.raises(TransportError, match="another key, model, layout") as raised:
        got(other, 1)
    assert raised.value.reason == "corrupt"
    one.close()
    other.close()


def test_the_least_recently_used_blocks_make_room(root: Path) -> None:
    transport = make(num_blocks=8)
    for number in range(8):
        transport.put(key(number), block(number), LATER)
        os.utime(folder(root) / key(number).hex(), (number, number))
    got(transport, 0)  # it counts as used now
    transport.put(key(8), block(8), LATER)
    held = {number for number in range(9) if transport.has([key(number)], LATER)}
    assert {0, 8} <= held
    assert 1 not in held
    for number in range(9, 60):
        transport.put(key(number), block(number), LATER)
        assert len(list(folder(root).iterdir())) <= 8
    transport.close()


def test_a_full_file_system_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = make()
    transport.put(key(1), block(1), LATER)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "_write", full)
    with pytest.raises(TransportError, match="shm://test has no room") as raised:
        transport.put(key(2), block(2), LATER)
    assert raised.value.reason == "full"
    assert transport.has([key(2)], LATER) == set()
    assert transport.has([key(1)], LATER) == set()  # it was evicted to make room
    transport.close()


WRITER = """
import sys, time
from pathlib import Path
from quire.runtime.transport import shared_memory
shared_memory.ROOT = Path(sys.argv[1])
def slow(file, data):
    for at in range(0, len(data), 10):
        file.write(data[at : at + 10])
        time.sleep(0.001)
transport = shared_memory.SharedMemoryTransport("test", 10**6, bytes.fromhex(sys.argv[2]), 1000)
transport.put(bytes(32), memoryview(bytes(1000)), 0.0)
shared_memory._write = slow
print("begun", flush=True)
for number in range(1, 1000):
    transport.put(number.to_bytes(32, "big"), memoryview(bytes(1000)), 0.0)
"""


def test_nobody_reads_half_a_block_of_an_engine_that_was_killed(root: Path) -> None:
    reader = make()
    command = [sys.executable, "-c", WRITER, str(root), LAYOUT.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        while not list(folder(root).glob("*.part")):
            time.sleep(0.001)
        writer.send_signal(signal.SIGKILL)
    left = list(folder(root).iterdir())
    for path in left:
        if not path.name.endswith(".part"):
            data = bytearray(SIZE)
            reader.get(bytes.fromhex(path.name), memoryview(data), LATER)  # it is whole
            assert bytes(data) == bytes(SIZE)
    later = make()  # it finds what was put, and removes what was not
    assert later.has([bytes(32)], LATER) == {bytes(32)}
    assert not list(folder(root).glob("*.part"))
    reader.close()
    later.close()
    assert list(root.iterdir()) == []


def test_a_folder_that_is_not_private_is_refused(root: Path) -> None:
    folder(root).mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"kv_transport: other users may access"):
        make()
    folder(root).rmdir()
    folder(root).symlink_to(root)
    with pytest.raises(ConfigError, match=r"kv_transport: .* is a symbolic link"):
        make()


def test_memory_for_less_than_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_transport_memory: .* hold no block"):
        SharedMemoryTransport("test", SIZE, LAYOUT, SIZE)
