"""The life of an engine process: it loads a model, serves it, and reports to the supervisor how it ended."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from quire.config.adapters import AdapterModule
from quire.config.embedding import EncoderConfig, PoolingModel
from quire.config.engine import DeviceConfig
from quire.config.facts import HardwareFacts
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.config.server import ServerConfig
from quire.engine.core import EngineCore
from quire.engine.decoding.vocabulary import Vocabulary
from quire.engine.encoder_core import EncoderCore
from quire.engine.executor import PreparesMore
from quire.engine.garbage import GarbageCollector
from quire.engine.process import EngineLoop
from quire.engine.progress import ProgressRecord
from quire.engine.transport import EngineSocket
from quire.observability.logging import set_up_logging
from quire.runtime.lazy_methods import lazy_methods
from quire.runtime.torch_import import find_modules_of_frames
from quire.serving.process.child import EXIT_ENGINE_DEAD, EXIT_FAILED, ProgressReports, enter_child, exit_orphaned
from quire.serving.process.control import (
    AdaptersNow,
    ControlChannel,
    EdgeGone,
    EdgeStuck,
    EngineStart,
    EngineUp,
    Fatal,
    Stop,
)
from quire.serving.process.link import EngineReady, ModelSizes
from quire.types.adapters import AdapterInfo
from quire.types.errors import ConfigError, EngineDead, InvalidRequest, ModelLoadError

logger = logging.getLogger("quire.engine")

_RANK_SHARE = 0.8  # share of the time for a step or a load that a rank may be late
_SLOW_CPU_FLOPS = 1e10  # floating point operations per second of one thread of a slow CPU

Report = Callable[[str, int, int], None]
Load = Callable[[EngineStart, Report], tuple[EngineCore | EncoderCore, EngineReady]]


def run_engine(arguments: list[str], load: Load, prepare: Callable[[], None] = lambda: None) -> int:
    """Load the model, serve it, and report over the control socket how serving ended. Returns the exit code. `prepare`
    runs before the configuration arrives, since the process may be started before the configuration is known."""
    channel = enter_child(arguments)
    prepare()
    start = channel.receive()
    if start is None:
        exit_orphaned()
    assert isinstance(start, EngineStart)
    set_up_logging(start.config.log_level, start.config.log_format, "engine")
    control = _Control(channel)
    try:
        core, ready = load(start, ProgressReports(channel))
        socket = EngineSocket(start.address)
        progress = Path(start.directory) / f"progress-{start.generation}"
        record = ProgressRecord(progress)
        loop = EngineLoop(core, socket, record, on_stuck=control.report_stuck)
        load_adapters_again(core, start.adapters)
        loop.on_adapters = control.report_adapters
        if "torch" in sys.modules:  # engines without a model, as in tests, do not import it
            from quire.runtime.accelerator import report_compilations
            from quire.runtime.torch_import import forget_library_pages

            forget_library_pages()
            report_compilations(record.extend_step)  # while kernels compile, the step counts as making progress
    except (ConfigError, ModelLoadError) as error:
        return _fail(channel, str(error), EXIT_FAILED, retry=start.generation > 1)
    except Exception as error:
        logger.debug("loading failed", exc_info=True)
        return _fail(channel, f"loading failed: {error!r}", EXIT_FAILED, retry=True)
    loop.between_steps = GarbageCollector().collect
    loop.nap_seconds = start.config.sleep_idle_seconds
    if isinstance(core, EngineCore) and isinstance(core.executor, PreparesMore):
        loop.when_idle = core.executor.prepare_more
    control.watch(loop)
    channel.send(EngineUp(ready, start.address, str(progress)))
    return _serve(loop, channel)


def import_ahead() -> None:
    """Import what every model needs, before the configuration is known."""
    with suppress(ImportError), find_modules_of_frames(), lazy_methods():  # loading reports what is missing
        from quire.runtime.executor.single import SingleExecutor  # noqa: F401
        from quire.serving.assembly import plan_model  # noqa: F401
    gc.freeze()  # the garbage collector need not scan the imports again


def load_engine(start: EngineStart, report: Report) -> tuple[EngineCore | EncoderCore, EngineReady]:
    """Load the model in this process. Raises ConfigError, DoesNotFit or ModelLoadError."""
    report("starting the engine", 0, 1)
    from quire.runtime.hardware import detect_hardware
    from quire.runtime.loading.files import files_at
    from quire.runtime.loading.resolve import resolve_model
    from quire.serving.assembly import PlannedEncoder, plan_model

    report("starting the engine", 1, 1)
    source = start.config.source
    planned = plan_model(files_at(Path(source.model)), start.config.engine)
    if planned.config.device.device == "cpu":
        warn_of_refusal(detect_hardware())
    _check_naps(start.config, planned.config.device, is_encoder=isinstance(planned, PlannedEncoder))
    if isinstance(planned, PlannedEncoder):
        core = planned.build_core(source.load_format, report)
        return core, _encoder_ready(start.generation, planned.model, planned.config, planned.pooling)
    logger.info("%s", "; ".join(" ".join(line.split()) for line in str(planned.memory).splitlines()))

    @cache
    def vocabulary() -> Vocabulary:
        from quire.serving.text.token_table import vocabulary_of  # imported late: not needed before the first grammar
        from quire.serving.text.tokenizer import load_tokenizer

        return vocabulary_of(load_tokenizer(resolve_model(source.tokenizer or source.model, offline=True)))

    on_cpu = planned.config.device.device == "cpu"
    if not on_cpu:
        gc.enable()  # uncollected tensors would hold device memory during graph capture
    tools = planned.tools(vocabulary, warm=not on_cpu)  # on a GPU, making it later would delay decoding rows
    config = planned.config
    step_seconds = longest_step(config.device, config.scheduler.max_num_batched_tokens, planned.model)
    ready = EngineReady(
        generation=start.generation,
        max_model_len=config.scheduler.max_model_len,
        vocab_size=planned.model.vocab_size,
        max_num_seqs=config.scheduler.num_rows,
        block_size=config.cache.block_size,
        num_blocks=config.cache.num_blocks,
        groups=config.cache.groups,
        images=config.scheduler.images,
        adapter_slots=config.scheduler.adapter_slots,
        dtype=config.device.dtype,
        device=config.device.device,
        policy=config.scheduler.policy,
        eos_ids=tuple(planned.model.eos_ids),
        ageing=config.scheduler.policy_settings.ageing,
        step_seconds=step_seconds,
        model=_sizes(planned.model),
        pooling=planned.pooling,
    )
    parallel = limit_rank_timeouts(
        config.parallel, max(start.config.step_timeout, step_seconds), start.config.load_timeout
    )
    planned = replace(planned, config=replace(config, parallel=parallel))
    return planned.build(source.load_format, report, tools), ready


def _check_naps(config: ServerConfig, device: DeviceConfig, *, is_encoder: bool) -> None:
    """Raise ConfigError if `sleep_idle_seconds` is given and the engine cannot sleep."""
    if config.sleep_idle_seconds is None:
        return
    if is_encoder:
        raise ConfigError("sleep_idle_seconds", "is for models that generate text", "leave it out")
    if device.device != "cpu" and not device.sleep:
        raise ConfigError("sleep_idle_seconds", "needs enable_sleep_mode on a GPU", "add --enable-sleep-mode")


def limit_rank_timeouts(config: ParallelConfig, step_seconds: float, load_seconds: float) -> ParallelConfig:
    """Return the configuration with timeouts for ranks that are shorter than those of the supervisor. So a rank that
    hangs is detected and named before the supervisor kills the engine."""
    step_seconds = min(config.rank_timeout, max(1.0, _RANK_SHARE * step_seconds))
    return replace(config, rank_timeout=step_seconds, load_timeout=_RANK_SHARE * load_seconds)


def load_adapters_again(core: EngineCore | EncoderCore, adapters: Iterable[AdapterModule]) -> None:
    """Load the LoRA adapters of the previous engine. Adapters that cannot be read any more are skipped and logged."""
    for name, folder in adapters:
        assert isinstance(core, EngineCore)
        try:
            core.adapters.load(name, folder)
        except InvalidRequest as error:
            logger.error("the LoRA adapter %s is gone after the restart of the engine: %s", name, error)
        except Exception:
            logger.exception("the LoRA adapter %s is gone after the restart of the engine", name)


def _encoder_ready(generation: int, model: ModelConfig, config: EncoderConfig, pooling: PoolingModel) -> EngineReady:
    return EngineReady(
        generation=generation,
        max_model_len=config.max_model_len,
        vocab_size=model.vocab_size,
        max_num_seqs=config.max_num_seqs,
        block_size=1,
        num_blocks=0,
        dtype=config.device.dtype,
        device=config.device.device,
        policy="fair",
        eos_ids=(),
        step_seconds=longest_step(config.device, config.max_num_batched_tokens, model),
        model=_sizes(model),
        pooling=pooling,
    )


def _sizes(model: ModelConfig) -> ModelSizes:
    heads = model.heads
    return ModelSizes(
        model.architecture, model.num_parameters, model.hidden_size, model.intermediate_size, model.num_layers,
        heads.num_query, heads.num_kv,
    )  # fmt: skip


def warn_of_refusal(facts: HardwareFacts) -> None:
    """Log a warning if the compiled CPU kernels cannot be used here: torch replaces them and is slower."""
    if facts.native_refusal is not None:
        logger.warning("slower than it could be: %s; `quire doctor` names the fix", facts.native_refusal)


def longest_step(device: DeviceConfig, num_tokens: int, model: ModelConfig) -> float:
    """Estimate the seconds that a step with `num_tokens` tokens takes on a slow CPU. Returns 0 for a GPU, where steps
    are short."""
    if device.device != "cpu":
        return 0.0
    operations = 2.0 * model.num_parameters * num_tokens
    return operations / (_SLOW_CPU_FLOPS * (device.threads or len(os.sched_getaffinity(0))))


class _Control:
    """Reads the supervisor's messages on a thread, also while the model loads. Ends the process if the supervisor is
    gone."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._loop: EngineLoop | None = None
        threading.Thread(target=self._read, name="control", daemon=True).start()

    def watch(self, loop: EngineLoop) -> None:
        """Pass messages to this loop from now on."""
        self._loop = loop

    def report_stuck(self, edge: int) -> None:
        self._channel.send(EdgeStuck(edge))

    def report_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        self._channel.send(AdaptersNow(tuple(AdapterModule(info.name, info.folder) for info in adapters)))

    def _read(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, EdgeGone) and self._loop is not None:
                self._loop.forget_edge(message.edge)
            elif isinstance(message, Stop):
                if self._loop is None:
                    os._exit(0)  # no request was accepted yet
                self._loop.stop()
        exit_orphaned()


def _serve(loop: EngineLoop, channel: ControlChannel) -> int:
    try:
        loop.run()
    except EngineDead as error:
        code = _fail(channel, str(error), EXIT_ENGINE_DEAD, retry=True)  # first: closing a failed device may fail
        try:
            loop.close()
        except Exception:
            logger.debug("closing failed after the engine's death", exc_info=True)
        return code
    except Exception as error:
        logger.exception("the engine's loop failed")
        return _fail(channel, f"the engine's loop failed: {error!r}", EXIT_ENGINE_DEAD, retry=True)
    loop.close()
    return 0


def _fail(channel: ControlChannel, reason: str, code: int, *, retry: bool) -> int:
    line = " ".join(reason.split())
    channel.send(Fatal(line, retry))  # the supervisor logs it
    return code
