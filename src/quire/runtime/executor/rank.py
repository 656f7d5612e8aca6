"""The process of one rank: it joins the other ranks, loads its part of the model and executes the engine's plans."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from quire.config.embedding import EncoderConfig
from quire.config.engine import EngineConfig
from quire.config.parallel import RankPlace
from quire.runtime.executor.channel import Channel, Kind, Message
from quire.runtime.executor.codec import FINGERPRINT, decode, encode
from quire.runtime.executor.life import LifePage
from quire.runtime.executor.plan_codec import PlanDecoder
from quire.runtime.executor.rings import RankRings
from quire.runtime.lazy_methods import lazy_methods
from quire.runtime.torch_import import defer_modules, find_modules_of_frames
from quire.types.errors import ConfigError, InvalidRequest, ModelLoadError, QuireError
from quire.types.standby import WeightUpdate

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from quire.runtime.executor.single import SingleExecutor
    from quire.runtime.parallel.ranks import Ranks

logger = logging.getLogger("quire.runtime")

EXIT_ORPHANED = 70  # the engine's process is gone
EXIT_FAILED = 71  # the cause is on the rank's status page
_REPORT_SECONDS = 0.1  # between two progress reports while loading
_MAX_MESSAGE_CHARS = 3_000  # characters of an error message

Config = TypeVar("Config", EngineConfig, EncoderConfig)
MakeStore = Callable[[RankPlace], "Store"]


class RankServer:
    """Serves one engine. `run` never returns: the process ends with it. Another thread ends the process when the
    engine's process is gone, even during a step."""

    def __init__(
        self,
        control: Channel | RankRings,
        calls: Channel,
        page: LifePage,
        make_store: MakeStore,
        end: Callable[[int], NoReturn] = os._exit,
        beats: int = -1,
    ) -> None:
        """`end` ends the process with an exit code. `beats` is a socket that gets a byte for every heartbeat, or -1 if
        the engine's process reads the status page itself."""
        self._beats = beats
        self._control, self._calls, self._page, self._make_store, self._end = control, calls, page, make_store, end
        self._plans = PlanDecoder()
        self._executor: SingleExecutor
        self._collecting: SimpleQueue[int] | None = None  # launched steps, for the thread that collects them
        self._sends_results = True
        self._progress = "", 0.0
        self._tells_progress = False

    def run(self) -> NoReturn:
        self._page.start_beating()
        try:
            start = self._control.receive()
            assert start is not None
            threading.Thread(target=self._serve_calls, name="quire-calls", daemon=True).start()
            self._load(decode(start.data))
            self._execute_messages()
        except EOFError:
            self._end(EXIT_ORPHANED)
        except BaseException as error:
            logger.debug("the rank failed", exc_info=True)
            self._page.write_last_message(describe_error(error))
            self._end(EXIT_FAILED)
        self._end(0)

    # ------------------------------------------------------------------------------------------------------- loading
    def _load(self, job: dict[str, Any]) -> None:
        self._page.note("importing modules")
        defer_modules()
        with find_modules_of_frames(), lazy_methods():
            import torch

            from quire.kernels.native.loader import set_threads
            from quire.runtime.device import torch_device
            from quire.runtime.hardware import detect_hardware
            from quire.runtime.parallel.make import backend_of, join_ranks, ranks_share_device

        if job["fingerprint"] != FINGERPRINT:
            raise ConfigError(
                "executor",
                "the rank runs another version of Quire than the engine",
                "install the same version on all machines",
            )
        config: Any = job["config"]  # an EngineConfig, or another one that `_build` reads
        place, shares = config.parallel.place(job["rank"]), ranks_share_device(config.parallel, config.device.device)
        config = config_of_rank(config, place, job["device_index"], detect_hardware().cores)
        device = torch_device(config.device.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        set_threads(config.device.threads or 1)
        backend = backend_of(device, shares_device=shares)
        self._page.note("meeting the other ranks")
        self._page.enter()
        ranks = join_ranks(
            place, self._make_store(place), backend, job["seconds"], self._page, on_cpu=device.type == "cpu"
        )
        self._page.leave()
        self._page.note("building the model")
        self._tells_progress = place.rank == 0
        self._page.start_native_beats(self._beats)
        if ranks.tensor.shared is not None:
            shared = ranks.tensor.shared
            self._page.count_meetings(lambda: shared.num_meetings)
        with lazy_methods():  # it imports modules
            num_bytes = self._build(job, config, ranks)
        self._page.ready()
        self._control.send(Kind.READY, encode(num_bytes))

    def _build(self, job: dict[str, Any], config: Any, ranks: Ranks) -> tuple[int, int]:
        """Build and load this rank's part of the model. Returns the bytes of its weights and of its KV cache."""
        from quire.runtime.executor.single import SingleExecutor

        self._executor = SingleExecutor(
            job["files"],
            job["model"],
            config,
            load_format=job["load_format"],
            progress=self._report_progress,
            draft_files=job["draft_files"],
            depth=job["depth"],
            ranks=ranks,
        )
        self._page.note("compiling kernels")
        self._executor.compile_remaining()
        self._sends_results = ranks.place.is_last_stage
        if config.device.device != "cpu":
            self._collecting = SimpleQueue()
            threading.Thread(target=self._collect_steps, name="quire-results", daemon=True).start()
        else:
            self._page.look_for_hangs()
        return self._executor.num_bytes

    def _report_progress(self, what: str, done: int, total: int) -> None:
        """Note the progress on the rank's status page. Rank 0 also sends it to the engine's process."""
        self._page.note(f"{what}, {done} of {total}" if done < total else f"after {what}")
        if not self._tells_progress:
            return
        phase, at = self._progress
        now = time.monotonic()
        if what != phase or done >= total or now - at >= _REPORT_SECONDS:
            self._progress = what, now
            self._control.send(Kind.PROGRESS, encode((what, done, total)))

    # --------------------------------------------------------------------------------------------------------- plans
    def _execute_messages(self) -> None:
        """Execute the engine's messages in order until STOP."""
        while True:
            message = self._control.receive()
            assert message is not None
            if message.kind is Kind.PLAN:
                self._launch(message)
            elif message.kind is Kind.MASKS:
                self._page.waits_for_engine = False
                self._executor.supply_masks(decode(message.data))
                self._collect()
            elif message.kind is Kind.REPORT:
                self._control.send(Kind.TRANSFERS, encode(self._executor.transfers()))
            elif message.kind is Kind.CHECK:
                self._control.send(Kind.CHECKED, encode(self._check()))
            else:
                assert message.kind is Kind.STOP
                self._executor.close()
                return

    def _launch(self, message: Message) -> None:
        plan = self._plans.decode(message.data)
        self._page.begin_step(plan.step)
        self._executor.launch(plan)
        if plan.guided:
            self._page.waits_for_engine = True
        else:
            self._collect()

    def _collect(self) -> None:
        """Send the result of the step launched last, or let the collecting thread send it when the device has finished
        the step."""
        if self._collecting is not None:
            self._collecting.put(0)
            return
        result = self._executor.collect()
        if self._sends_results:
            self._page.waits_for_engine = True  # the engine may have no room for a large result yet
            self._control.send(Kind.RESULT, encode(result))
            self._page.waits_for_engine = False
        self._page.end_step()

    def _collect_steps(self) -> None:
        """Collect steps in a thread. For devices where a launch only enqueues: the next step is launched while this
        thread waits for the previous one."""
        assert self._collecting is not None
        try:
            while True:
                self._collecting.get()
                result = self._executor.collect()
                if self._sends_results:
                    self._control.send(Kind.RESULT, encode(result))
                self._page.end_step()
        except BaseException as error:  # noqa: BLE001 - the engine reports any error
            self._page.write_last_message(describe_error(error))
            self._end(EXIT_FAILED)

    def _check(self) -> str:
        try:
            self._executor.check()
        except AssertionError as error:
            return repr(error)
        return ""

    # --------------------------------------------------------------------------------------------------------- calls
    def _serve_calls(self) -> None:
        """Read and forget adapters while steps run. Ends the process when the engine's process is gone."""
        try:
            while (message := self._calls.receive()) is not None:
                try:
                    answer = self._answer(message)
                except InvalidRequest as error:
                    self._calls.send(Kind.REFUSED, encode((error.field, error.reason, error.fix)))
                except QuireError as error:
                    self._calls.send(Kind.REFUSED, encode(("", str(error), "")))
                except Exception as error:  # noqa: BLE001 - only this adapter fails
                    refusal = ("lora_path", f"cannot be read: {error!r:.200}", "check its files")
                    refusal = ("", f"{error!r:.300}", "") if message.kind is Kind.STANDBY else refusal
                    self._calls.send(Kind.REFUSED, encode(refusal))
                else:
                    self._calls.send(Kind.ANSWER, encode(answer))
        except (EOFError, OSError):
            self._end(EXIT_ORPHANED)

    def _answer(self, message: Message) -> object:
        if message.kind is Kind.READ_ADAPTER:
            return self._executor.read_adapter(*decode(message.data))
        if message.kind is Kind.STANDBY:
            method, *arguments = decode(message.data)
            if method == "check_weights":
                path, is_partial = arguments
                arguments = [WeightUpdate(path, is_partial=is_partial)]
            return self._executor.stand_by(method, *arguments)
        assert message.kind is Kind.FORGET_ADAPTER
        self._executor.forget_adapter(*decode(message.data))
        return None


def config_of_rank(config: Config, place: RankPlace, device_index: int | None, cores: int) -> Config:
    """Return the configuration of one rank: with its device, its share of the CPU threads, and its folder of the disk
    tier."""
    device = config.device
    if device.device == "cpu":
        device = replace(device, threads=max(1, (device.threads or cores) // place.config.num_ranks))
    elif device_index is not None:
        device = replace(device, device=f"cuda:{device_index}")
    if isinstance(config, EncoderConfig):
        return replace(config, device=device)
    cache = config.cache
    if cache.tiers.disk_path:
        cache = replace(cache, tiers=replace(cache.tiers, disk_path=str(Path(cache.tiers.disk_path) / _part(place))))
    return replace(config, device=device, cache=cache)


def _part(place: RankPlace) -> str:
    """Return the name of a rank's folder in the disk tier. Other ranks and other parallel sizes have other folders."""
    config = place.config
    return f"rank-{place.rank}-of-{config.tensor}x{config.pipeline}"


def describe_error(error: BaseException) -> bytes:
    """Encode an error as the last message of a rank, so that `read_error` can restore it."""
    if isinstance(error, ConfigError):
        return encode((type(error).__name__, *_cut(error.setting, error.reason, error.fix)))
    if isinstance(error, ModelLoadError):
        return encode((type(error).__name__, *_cut(error.file, error.reason, error.tensor or "", error.fix)))
    return encode(("", *_cut(f"{type(error).__name__}: {error}")))


def _cut(*texts: str) -> tuple[str, ...]:
    """Cut texts so that all of them fit into the status page."""
    most = _MAX_MESSAGE_CHARS // len(texts)
    return tuple(text[: most if text.isascii() else most // 4] for text in texts)


def read_error(message: bytes) -> tuple[str, ConfigError | ModelLoadError | None]:
    """Decode a rank's last message. Returns its text, and the original error if it is one that the user can fix."""
    kind, *texts = decode(message)
    if kind in ("ConfigError", "DoesNotFit"):
        setting, reason, fix = texts
        error = ConfigError(setting, reason, fix)
        return str(error), error
    if kind == "ModelLoadError":
        file, reason, tensor, fix = texts
        found = ModelLoadError(file, reason, tensor=tensor or None, fix=fix)
        return str(found), found
    return " ".join(texts[0].split()), None
