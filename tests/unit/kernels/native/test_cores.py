"""The cores that threads of the compiled kernels are pinned to, on machines made of files, and pinning itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kernel_threads import kernel_threads
from quire.kernels.native import cores, loader
from quire.kernels.native.cores import Claims, Core, choose_cores, nodes_of, pin_threads, read_cores
from quire.kernels.native.loader import open_library, why_not_native
from quire.kernels.native.ops import multiply
from quire.kernels.native.panels import cut_panels

REFUSAL = why_not_native(torch.float32, torch.device("cpu"))
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are pinned on Linux alone")
needs_kernels = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
CLAIM = (
    "from quire.kernels.native.cores import Claims; claims = Claims(); print(claims.take({}, {}), flush=True); input()"
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two memory nodes of four cores with two hardware threads each: 0-3 and 8-11, 4-7 and 12-15."""
    for node, text in enumerate(("0-3,8-11\n", "4-7,12-15\n")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(text)
    for number in range(16):
        (tmp_path / f"cpu/cpu{number}/topology").mkdir(parents=True)
        text = f"{number % 8},{number % 8 + 8}\n"
        (tmp_path / f"cpu/cpu{number}/topology/thread_siblings_list").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("allowed", "threads", "chosen"),
    [
        (range(16), 1, (0,)),
        (range(16), 4, (0, 1, 2, 3)),  # a node, no units shared
        (range(16), 6, (0, 1, 2, 3, 4, 5)),
        (range(16), 8, (0, 1, 2, 3, 4, 5, 6, 7)),
        (range(16), 10, (0, 1, 2, 3, 8, 9, 4, 5, 6, 7)),  # siblings last, nodes side by side
        (range(16), 16, (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)),
        (range(16), 17, ()),
        ((2, 4, 5, 6), 3, (4, 5, 6)),  # the first node with enough
        ((1, 9, 5, 13), 2, (1, 5)),
        ((8, 9), 2, (8, 9)),  # siblings of cores that are not allowed share nothing
        ((), 1, ()),
        (range(16), 0, ()),
    ],
)
def test_threads_get_cores_of_one_node_that_share_no_units_where_there_are_enough(
    machine: Path, allowed: tuple[int, ...], threads: int, chosen: tuple[int, ...]
) -> None:
    assert choose_cores(read_cores(set(allowed), machine), threads) == chosen


def test_nodes_are_those_of_the_cores(machine: Path, tmp_path: Path) -> None:
    assert nodes_of((0, 9), machine) == [0]
    assert nodes_of((0, 12), machine) == [0, 1]
    assert read_cores({3, 1}, tmp_path / "nothing") == [Core(False, 0, 1), Core(False, 0, 3)]


@needs_linux
def test_no_core_is_claimed_twice_and_all_are_free_when_a_process_ends(machine: Path) -> None:
    begin, first, second = 5_000 + 4 * os.getpid(), Claims(), Claims()  # cores that no machine has, nor another test
    numbers, three = set(range(begin, begin + 4)), (begin, begin + 1, begin + 2)
    assert first.take(3, numbers, machine) == first.cores == three
    assert second.take(2, numbers, machine) == ()
    assert second.take(1, numbers, machine) == (begin + 3,)
    first.release()
    code = CLAIM.format(3, numbers)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == str(three)
        assert first.take(1, numbers, machine) == ()
        other.kill()
    assert first.take(3, numbers, machine) == three
    first.release()
    second.release()


@pytest.fixture
def unpinned() -> Iterator[None]:
    yield
    pin_threads(wanted=False)


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it does while the kernels multiply with two threads: workers follow when they wake for a loop."""
    x, weight, end = torch.randn(8, 512), cut_panels(torch.randn(4096, 512)), time.monotonic() + 60
    with kernel_threads(2):
        while not condition() and time.monotonic() < end:
            multiply(x, weight)
            time.sleep(0.001)
    return condition()


def masks() -> list[set[int]]:
    """The cores that each other thread of this process may use."""
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    found = []
    for task in tasks:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found += [os.sched_getaffinity(task)] if task != os.getpid() else []
    return found


@needs_linux
@needs_kernels
@pytest.mark.usefixtures("unpinned")
def test_each_worker_is_pinned_to_a_core_and_the_caller_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setattr(cores, "kernel_threads", lambda: 2)
    monkeypatch.setattr(cores, "usable_cores", lambda: len(allowed))
    chosen = pin_threads(wanted=True)
    if not chosen:
        pytest.skip("another process has pinned threads")
    assert len(chosen) == 2
    assert comes_true(lambda: {chosen[1]} in masks())
    assert os.sched_getaffinity(0) == allowed
    assert pin_threads(wanted=False) == ()
    assert comes_true(lambda: {chosen[1]} not in masks())


MOVED = """
import os, time, torch
from pathlib import Path
from quire.kernels.native.cores import pin_threads
from quire.kernels.native.loader import set_threads
from quire.kernels.native.panels import cut_panels
from quire.kernels.native.ops import multiply

def masks():
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}

first = min(os.sched_getaffinity(0))
torch.set_num_threads(1)
set_threads(2)
os.sched_setaffinity(0, {first})
pin_threads(wanted=False)  # an engine is opened, and another one when the process may use all cores again
os.sched_setaffinity(0, range(os.cpu_count()))
pin_threads(wanted=False)
x, weight, end = torch.randn(8, 512), cut_panels(torch.randn(4096, 512)), time.monotonic() + 60
while frozenset({first}) in masks() and time.monotonic() < end:
    multiply(x, weight)  # threads follow when they wake for a loop
print(frozenset({first}) in masks())
"""


@needs_linux
@needs_kernels
def test_threads_that_nobody_pins_run_where_the_thread_does_that_made_them() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "False\n"


@needs_kernels
@pytest.mark.usefixtures("unpinned")
def test_a_process_with_a_share_of_its_cores_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "allowed_cores", lambda: frozenset({0, 1, 2, 3}))
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    monkeypatch.setattr(cores, "kernel_threads", lambda: 2)
    assert pin_threads(wanted=True) == ()


@needs_kernels
@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize(("allowed", "mask"), [(range(4), []), (range(16), [0b11])])
def test_pages_come_from_the_nodes_of_all_cores_where_there_are_several(
    allowed: range, mask: list[int], machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(cores, "allowed_cores", lambda: frozenset(allowed))
    monkeypatch.setattr(cores, "usable_cores", lambda: len(allowed))
    monkeypatch.setattr(cores, "kernel_threads", lambda: len(allowed))
    monkeypatch.setattr(cores.Claims, "take", lambda _claims, _threads, numbers: tuple(numbers))
    monkeypatch.setattr(cores, "nodes_of", lambda numbers: nodes_of(numbers, machine))
    monkeypatch.setattr(open_library(), "quire_pin_threads", lambda _cores, _count: None)
    monkeypatch.setattr(open_library(), "quire_interleave_memory", told.append)
    assert pin_threads(wanted=True)
    assert told == mask


def test_kernels_use_the_threads_that_were_asked_for_up_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "usable_cores", lambda: 3)
    monkeypatch.setattr(loader._Threads, "asked", 8)
    assert loader.kernel_threads() == 3
