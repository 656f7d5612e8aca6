"""Shared by all tests: nothing reaches for the hub, tokenizers leave the cores to torch, long runs are on demand.
Threads that wait sleep, as several test files may share the cores."""

from __future__ import annotations

import gc
import os
import signal
import sys
from asyncio import selector_events
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if os.environ.get("QUIRE_TEST_DEVICE") == "cpu":  # as on a machine without a GPU, in all processes of a test
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


# how long an example takes says how busy the machine is; the same examples are tried in every run, others with --soak
settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")


def _close_late_connections() -> None:
    """asyncio leaves a connection open that it accepted just before its server closed, and a test fails where the
    garbage collector finds it (CPython's issue 109564). Close it at once."""
    transport: Any = vars(selector_events)["_SelectorTransport"]
    begin = transport.__init__

    def init(self: Any, loop: object, sock: Any, *others: object, **named: object) -> None:
        try:
            begin(self, loop, sock, *others, **named)
        except AssertionError:  # the server has closed
            self._sock = None
            sock.close()
            raise

    transport.__init__ = init


_close_late_connections()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long tests of tests/soak too (or QUIRE_TEST_SOAK=1)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: takes minutes and states time bounds; only with --soak")
    if _is_soak(config):
        settings.load_profile("search")
    if os.environ.get("QUIRE_TEST_DEVICE", "cpu") != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("QUIRE_TEST_DEVICE names a GPU, and torch finds none: leave it out")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background: Ctrl-C is tested all the same
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get(
        "QUIRE_CPU_PATH"
    ):  # tests of kernels know no environment: see tests/unit/kernels/native/test_paths
        from quire.runtime.hardware import use_cpu_path

        use_cpu_path()


def _is_soak(config: pytest.Config) -> bool:
    return bool(config.getoption("--soak")) or os.environ.get("QUIRE_TEST_SOAK") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_soak(config):
        return
    left_out = [item for item in items if item.get_closest_marker("soak")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of model families and the engine's features, of the cells that were run."""
    found = [each for some in terminalreporter.stats.values() for each in some]
    reports = [each for each in found if isinstance(each, pytest.TestReport)]
    if any(report.user_properties for report in reports):
        from tests.families.table import cells_of, table_of

        if cells := cells_of(reports):
            terminalreporter.section("families and features")
            terminalreporter.write_line("\n".join(table_of(cells)))


def pytest_collection_finish() -> None:
    """A process that serves opens one engine, which looks for garbage once and thaws the heap in the end. Tests open
    hundreds, beside all that the test files have imported: a second for each of them."""
    for name in ("single", "ranked"):
        if executor := sys.modules.get(f"quire.runtime.executor.{name}"):
            vars(executor)["gc"] = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """What was imported and cached before a file's tests is not searched for garbage while they run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _seeded_file() -> None:
    """Random weights are the same, whatever file was run before by the same process."""
    _seed()


@pytest.fixture(autouse=True)
def _seeded(_seeded_file: None) -> None:
    """So are random inputs, whatever test was."""
    _seed()


def _seed() -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The kernels use one thread: tiny models gain nothing from more."""
    import torch

    from quire.kernels.native.loader import set_threads

    before = torch.get_num_threads()
    set_threads(1)
    yield
    set_threads(before)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait for blocks on disk and at other engines however busy the machine is, and do not compute them
    meanwhile. When they end, all that they were to write is written."""
    from quire.engine import handover
    from quire.engine.scheduler import prefetch
    from quire.runtime.tiers import disk_store

    monkeypatch.setattr(handover, "HANDOVER_SECONDS", 120.0)
    monkeypatch.setattr(prefetch, "_LEAST_SECONDS", 120.0)
    monkeypatch.setattr(prefetch, "_MOST_SECONDS", 120.0)
    monkeypatch.setattr(prefetch, "_MOST_PLANS", 10**9)
    monkeypatch.setattr(disk_store, "_SCAN_SECONDS", 120.0)
    monkeypatch.setattr(disk_store.DiskStore.close, "__defaults__", (120.0,))
