"""Plans and builds the engine of a model from its files. Used by the offline API and by the engine process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from quire.config.adapters import AdapterModule, read_modules
from quire.config.arguments import EngineArguments, read_arguments
from quire.config.embedding import (
    EmbeddingSettings,
    EncoderConfig,
    PoolingModel,
    describe_decoder_pooling,
    describe_pooling,
    resolve_encoder_config,
)
from quire.config.engine import EngineConfig, SchedulerConfig
from quire.config.facts import HardwareFacts, cuda_index
from quire.config.lengths import with_usable_indexer
from quire.config.memory import MemoryPlan
from quire.config.memory_check import check_memory
from quire.config.model import ModelConfig
from quire.config.parallel import check_encoder
from quire.config.rank_model import models_of_ranks
from quire.config.resolve import resolve_engine_config
from quire.config.speculation import DRAFT_MODEL, read_speculation
from quire.config.vision import is_text_only
from quire.engine.adapter_fetch import SynchronousFetch
from quire.engine.core import EngineCore
from quire.engine.decoding.grammar import SynchronousGrammars
from quire.engine.decoding.grammar_compiler import GrammarCompiler
from quire.engine.decoding.native_memory import give_back
from quire.engine.decoding.tools import DecodingTools
from quire.engine.decoding.vocabulary import VocabularySource
from quire.engine.encoder_core import EncoderCore
from quire.engine.executor import Executor
from quire.engine.speculation.registry import make_proposers
from quire.runtime.device import read_device_memory
from quire.runtime.encoder.encoder import TextEncoder, TextRunner
from quire.runtime.encoder.executor import EncoderExecutor
from quire.runtime.executor.single import SingleExecutor
from quire.runtime.hardware import detect_hardware
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.hf.mtp import has_head
from quire.runtime.loading.hf.pooling_task import read_pooling_settings
from quire.runtime.loading.model_config import read_model_config
from quire.runtime.loading.namespace import cache_namespace
from quire.runtime.loading.progress import Progress
from quire.runtime.loading.resolve import resolve_model
from quire.runtime.models.build import count_rank_weights, without_vision
from quire.runtime.models.registry import DECODERS, ENTRIES, check_drafts, check_generates
from quire.types.errors import ConfigError, InvalidRequest

logger = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """The resolved configuration and memory plan of an engine. Nothing is allocated until `build`."""

    files: ModelFiles
    model: ModelConfig
    config: EngineConfig
    memory: MemoryPlan
    draft_files: ModelFiles | None = None  # of the draft model, if one is configured
    settings: EmbeddingSettings | None = None  # how token vectors are pooled; None: the model generates text
    modules: tuple[AdapterModule, ...] = ()  # LoRA adapters to load at start
    free_memory: int | None = None  # bytes of the GPU that were free at planning; None: a CPU

    @property
    def pooling(self) -> PoolingModel | None:
        """The model's pooling, or None if the engine generates text."""
        if self.settings is None:
            return None
        return describe_decoder_pooling(self.model, self.settings, self.config.scheduler.max_model_len)

    @property
    def advice(self) -> str | None:
        """How to use the MTP head of the checkpoint, if it has one that does not draft and nothing else does."""
        config = self.config
        fits = config.cache.layout == "paged" and not config.cache.tiers.enabled
        if config.speculation is not None or not fits or self.files.kind != "hf":
            return None
        if not has_head(self.files.path, self.model):
            return None
        return 'the checkpoint has an MTP head: to draft with it, set speculative_config to {"method": "mtp"}'

    def build(
        self, load_format: Literal["auto", "dummy"], progress: Progress, tools: DecodingTools | None = None
    ) -> EngineCore:
        """Load the weights and return the engine. Its `close` frees the memory. Raises ConfigError if the settings do
        not fit the model."""
        _check_dummy(load_format, self.model)
        if (advice := self.advice) is not None:
            logger.info("%s", advice)
        config = self.config
        if config.cache.tiers.outlives_process:  # other tiers end with this process and its only model
            namespace = cache_namespace(self.files, self.model, config, load_format)
            config = replace(config, cache=replace(config.cache, namespace=namespace))
        executor = self._make_executor(config, load_format, progress)
        give_back()  # return memory that loading has freed to the operating system
        try:
            self._check_memory(config)
            proposers = make_proposers(config.speculation, executor.depth)
            tools = replace(tools or DecodingTools(), proposers=proposers)
            return load_modules(_make_core(executor, config, self.model.vocab_size, tools), self.modules)
        except BaseException:
            executor.close()
            raise

    def _make_executor(
        self, config: EngineConfig, load_format: Literal["auto", "dummy"], progress: Progress
    ) -> Executor:
        if config.parallel.executor == "single":
            return SingleExecutor(
                self.files,
                self.model,
                config,
                load_format=load_format,
                progress=progress,
                draft_files=self.draft_files,
            )
        from quire.runtime.executor.make import make_executor  # imported late: not needed with one rank
        from quire.runtime.executor.ranked import RankJob

        return make_executor(RankJob(self.files, self.model, config, load_format, self.draft_files), progress)

    def _check_memory(self, config: EngineConfig) -> None:
        """Log the GPU memory in use beside the memory plan, as a warning if they differ by much. Does nothing if the
        ranks are other processes: their memory cannot be read here."""
        if self.free_memory is None or config.parallel.executor != "single":
            return
        found = check_memory(self.memory, self.free_memory, read_device_memory(config.device.device))
        logger.log(logging.WARNING if found.is_off else logging.INFO, "%s", found)

    def tools(self, vocabulary: VocabularySource | None, *, warm: bool = False) -> DecodingTools:
        """Return what the engine decodes with. `vocabulary` is called when the first grammar is compiled, or at once if
        `warm`. Without a vocabulary there are no grammars."""
        if vocabulary is None:
            return DecodingTools()
        grammars = GrammarCompiler(vocabulary, self.model.vocab_size)
        if warm:
            grammars.warm()
        return DecodingTools(grammars, vocabulary=vocabulary, checked_only=True)


def _make_core(executor: Executor, config: EngineConfig, vocab_size: int, tools: DecodingTools) -> EngineCore:
    if config.parallel.executor == "torchrun":
        from quire.runtime.executor.torchrun import TorchrunExecutor

        if isinstance(executor, TorchrunExecutor):
            tools = replace(tools, grammars=SynchronousGrammars(tools.grammars))
            core = EngineCore(executor, config.cache, config.scheduler, vocab_size, tools=tools, clock=executor.clock)
            core.adapters.fetch = SynchronousFetch(executor)
            return core
    if config.recording is None:
        return EngineCore(executor, config.cache, config.scheduler, vocab_size, tools=tools)
    from quire.engine.recording.recorder import make_recorded_core  # imported late: only for recording
    from quire.engine.recording.writer import RecordingWriter

    writer = RecordingWriter.from_config(config, vocab_size, max(executor.depth, config.scheduler.micro_batches))
    return make_recorded_core(executor, config.cache, config.scheduler, vocab_size, writer=writer, tools=tools)


def load_modules(core: EngineCore, modules: Iterable[AdapterModule]) -> EngineCore:
    """Load the LoRA adapters that are configured at start, and return `core`. Raises ConfigError."""
    for name, folder in modules:
        try:
            core.adapters.load(name, folder)
        except InvalidRequest as error:
            raise ConfigError("lora_modules", f"{name!r}={folder}: {error.reason}", error.fix) from None
    return core


@dataclass(frozen=True, slots=True)
class PlannedEncoder:
    """The resolved configuration of a text encoder. Nothing is allocated until `build`."""

    files: ModelFiles
    model: ModelConfig
    config: EncoderConfig
    settings: EmbeddingSettings

    def build(self, load_format: Literal["auto", "dummy"], progress: Progress) -> TextRunner:
        """Load the weights and return the encoder. Its `close` frees the memory."""
        files, model, config = self.files, self.model, self.config
        if config.parallel.executor == "processes":
            from quire.runtime.encoder.ranked import EncoderJob, RankedEncoder  # imported late: not needed otherwise

            return RankedEncoder(EncoderJob(files, model, config, self.settings, load_format), progress)
        return TextEncoder(files, model, config, self.settings, load_format=load_format, progress=progress)

    def build_core(self, load_format: Literal["auto", "dummy"], progress: Progress) -> EncoderCore:
        """Load the weights and return the core that an engine process runs. Texts of several requests share a batch,
        and the policy `fair` orders the requests."""
        from quire.serving.pooled_texts import check_work  # imported late: not needed to generate text

        executor = EncoderExecutor(self.build(load_format, progress), self.settings)
        config, model = self.config, self.pooling
        limits = SchedulerConfig(
            config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, policy="fair"
        )  # fmt: skip
        return EncoderCore(executor, limits, self.model.vocab_size, check=partial(check_work, model))

    @property
    def pooling(self) -> PoolingModel:
        return describe_pooling(self.model, self.settings, self.config)


def plan_model(
    files: ModelFiles, arguments: EngineArguments, *, offline: bool = False
) -> PlannedEngine | PlannedEncoder:
    """Decide how to run a model on this machine, for a server or (`offline`) for an LLM. Raises ConfigError, DoesNotFit
    or ModelLoadError."""
    model = read_model_config(files)
    kind = ENTRIES[model.architecture].kind
    if kind == "draft head":
        check_generates(model.architecture)
    if offline and kind == "decoder" and arguments.task in ("auto", "generate"):
        return _plan_engine(files, model, arguments, offline=offline)  # it can do both; the call decides
    settings = read_pooling_settings(files, arguments.task)
    if settings is None or kind in DECODERS:
        return replace(_plan_engine(files, model, arguments, offline=offline), settings=settings)
    parallel = read_arguments(arguments).parallel
    check_encoder(parallel)
    models_of_ranks(model, parallel)
    counted = count_rank_weights(model, parallel)
    config = resolve_encoder_config(arguments, detect_hardware(), counted, settings)
    return PlannedEncoder(files, model, config, settings)


def plan_engine(files: ModelFiles, arguments: EngineArguments, *, offline: bool = False) -> PlannedEngine:
    """Decide how to run a model that must generate text. Raises like `plan_model`."""
    model = read_model_config(files)
    check_generates(model.architecture)
    return _plan_engine(files, model, arguments, offline=offline)


def _plan_engine(files: ModelFiles, model: ModelConfig, arguments: EngineArguments, *, offline: bool) -> PlannedEngine:
    model, draft_files = as_served(model, arguments), find_draft(arguments, files)
    draft = None if draft_files is None else read_model_config(draft_files)
    if draft is not None and draft.mtp is None:
        check_drafts(draft.architecture)
    parallel, facts = read_arguments(arguments).parallel, detect_hardware()
    model = with_usable_indexer(model, arguments, facts.device)
    models_of_ranks(model, parallel)  # raises if there are too many ranks, before weights are counted
    if draft is not None:
        draft = with_usable_indexer(draft, arguments, facts.device)
        draft = count_rank_weights(draft, parallel)
    counted = count_rank_weights(model, parallel)
    config, memory = resolve_engine_config(arguments, facts, counted, draft, offline=offline)
    modules = read_modules(arguments.lora_modules, enable=arguments.enable_lora)
    free = free_memory(facts, config.device.device)
    return PlannedEngine(files, model, config, memory, draft_files, modules=modules, free_memory=free)


def as_served(model: ModelConfig, arguments: EngineArguments) -> ModelConfig:
    """Return the model without its vision tower if requests may have no images, otherwise unchanged."""
    return without_vision(model) if model.vision is not None and is_text_only(arguments.limit_mm_per_prompt) else model


def free_memory(facts: HardwareFacts, device: str) -> int | None:
    """Return how many bytes of the GPU were free when `facts` were collected, or None for a CPU."""
    return None if device == "cpu" else facts.cuda[cuda_index(device)].free_memory


def find_draft(arguments: EngineArguments, files: ModelFiles, *, offline: bool = False) -> ModelFiles | None:
    """Return the files of the draft model, downloaded unless `offline`, or those of the MTP head in `files`, or None if
    none drafts. Raises like `resolve_model`."""
    speculation = read_speculation(arguments.speculative_config)
    if speculation is not None and speculation.method == "mtp":
        return replace(files, is_head=True)
    if speculation is None or speculation.model is None:
        return None
    return resolve_model(speculation.model, offline=offline, setting=DRAFT_MODEL)


def _check_dummy(load_format: Literal["auto", "dummy"], model: ModelConfig) -> None:
    """Refuse load_format="dummy" for a quantized checkpoint: dummy weights are not quantized, so they would take more
    memory than was planned."""
    if load_format == "dummy" and model.levels.gpu_parameters + model.levels.parameters and model.quantization:
        reason = f'"dummy" makes weights that are not quantized, and those of the checkpoint are {model.quantization}'
        raise ConfigError("load_format", reason, "leave quantization_config out of config.json")
