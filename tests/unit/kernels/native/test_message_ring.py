"""Rings of messages in shared memory, read by threads as by processes: the compiled functions let threads run."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import pytest

from quire.kernels.native.loader import Unavailable, open_library
from quire.kernels.native.message_ring import MessageRing, RingSet
from quire.kernels.native.ring_layout import DOORBELL_BYTES, MOST_BYTES, SLOTS, ring_bytes

SOON, LONG = 1_000, 30_000_000  # microseconds


@pytest.fixture(autouse=True)
def kernels() -> None:
    try:
        open_library()
    except Unavailable as reason:
        pytest.skip(str(reason))


def make_ring(readers: int, *, first: int = 0) -> list[MessageRing]:
    """A ring for its writer, and one for each reader. `first`: the number of the first message."""
    memory = mmap.mmap(-1, DOORBELL_BYTES + ring_bytes(readers))
    for line in range(readers + 2):
        struct.pack_into("<I", memory, line * 64, first)
    rings = [MessageRing(memory, DOORBELL_BYTES, 0, readers) for _ in range(readers + 1)]
    for ring in rings:
        ring._taken = first
    return rings


def message(number: int) -> bytes:
    """Of a length and bytes that its number tells."""
    return blake2b(number.to_bytes(8, "little")).digest() * (1 + number % 50)


def read_all(ring: MessageRing, reader: int, count: int) -> Iterator[tuple[int, bytes | None]]:
    for _ in range(count):
        found = ring.receive(reader, LONG)
        assert found is not None, "it did not come"
        kind, data = found
        yield kind, None if data is None else bytes(data)


@pytest.mark.parametrize("first", [0, 2**32 - 500, 2**31 - 500])
def test_every_reader_gets_every_message_whole_and_in_order(first: int) -> None:
    writer, *readers = make_ring(3, first=first)
    count = 2_000
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(list, read_all(ring, number, count)) for number, ring in enumerate(readers)]
        for number in range(count):
            while not writer.post(number % 7, message(number)):
                pass
        for each in found:
            assert each.result(60) == [(number % 7, message(number)) for number in range(count)]


def test_a_message_of_the_largest_size_arrives_whole() -> None:
    writer, reader = make_ring(1)
    data = bytes(range(256)) * (MOST_BYTES // 256) + b"x" * (MOST_BYTES % 256)
    assert writer.post(3, data)
    assert writer.post(4, b"")
    assert list(read_all(reader, 0, 2)) == [(3, data), (4, b"")]


def test_no_message_is_overwritten_before_the_slowest_reader_has_read_it() -> None:
    writer, quick, slow = make_ring(2)
    for number in range(SLOTS):
        assert writer.post(1, message(number))
    assert not writer.post(1, b"one too many")
    assert len(list(read_all(quick, 0, SLOTS))) == SLOTS
    assert quick.receive(0, 0) is None
    assert not writer.post(1, b"one too many"), "the slow one has read none"
    assert next(read_all(slow, 1, 1)) == (1, message(0))
    assert next(read_all(slow, 1, 1)) == (1, message(1)), "which says that it has read the one before"
    assert writer.post(1, message(SLOTS))
    assert not writer.post(1, b"one too many")
    assert [data for _, data in read_all(slow, 1, SLOTS - 1)] == [message(number) for number in range(2, SLOTS + 1)]


def test_a_message_that_lies_elsewhere_has_its_place_in_the_order() -> None:
    writer, reader = make_ring(1)
    for data in (b"before", None, b"after"):
        assert writer.post(2, data)
    assert [data for _, data in read_all(reader, 0, 3)] == [b"before", None, b"after"]


def test_memory_cannot_be_closed_while_a_ring_is_in_it() -> None:
    memory = mmap.mmap(-1, DOORBELL_BYTES + ring_bytes(1))
    ring = MessageRing(memory, DOORBELL_BYTES, 0, 1)
    together = RingSet([ring])
    del ring
    with pytest.raises(BufferError):
        memory.close()
    assert together.receive(0) is None
    del together
    memory.close()


def test_who_waits_in_vain_is_told_so() -> None:
    writer, reader = make_ring(1)
    assert reader.receive(0, SOON) is None
    writer.post(1, b"x")
    assert reader.receive(0, 0) == (1, b"x")


@pytest.mark.parametrize("first", [0, 2**32 - 1])
def test_a_reader_that_comes_back_does_not_keep_the_writer_from_waking_another_one(first: int) -> None:
    """The writer has raised the number of the doorbell for a message that one reader sleeps for. Before it looks whom
    to wake, another reader reads that message and waits for the next one."""
    writer, quick, _sleeper = make_ring(2, first=first)
    assert writer.post(1, b"x")
    assert quick.receive(0, 0) == (1, b"x")
    assert quick.receive(0, SOON) is None
    number, wanted = struct.unpack_from("<II", writer._memory, 0)
    assert number == (first + 1) % 2**32
    assert (number - wanted) % 2**32 < 2**31, "the writer wakes nobody"


@pytest.mark.parametrize("first", [0, 2**32 - 100])
def test_the_reader_of_several_rings_gets_one_message_of_each_at_a_time(first: int) -> None:
    """Writers may be several messages apart."""
    count, size = 500, ring_bytes(1)
    memory = mmap.mmap(-1, DOORBELL_BYTES + 3 * size)
    struct.pack_into("<I", memory, 0, first)  # of the doorbell
    writers, own = ([MessageRing(memory, DOORBELL_BYTES + n * size, 0, 1) for n in range(3)] for _ in range(2))
    for number in range(3):
        for line in range(2):
            struct.pack_into("<I", memory, DOORBELL_BYTES + number * size + 64 * line, first)
        own[number]._taken = first
    together = RingSet(own)
    together._taken = first
    assert together.receive(SOON) is None

    def write(place: int) -> None:
        for number in range(count):
            while not writers[place].post(place, message(number)):
                pass

    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(write, place) for place in range(3)]
        for number in range(count):
            found = together.receive(LONG)
            assert found is not None
            assert found == [(place, bytearray(message(number))) for place in range(3)]
        for each in done:
            each.result(60)
    assert together.receive(0) is None
    writers[0].post(1, b"alone")
    assert together.receive(SOON) is None, "two are missing"
