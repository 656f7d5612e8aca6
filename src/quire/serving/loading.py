"""Loads a model into this process: its files, tokenizer, default sampling parameters and engine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

from quire.config.arguments import EngineArguments
from quire.config.embedding import PoolingModel
from quire.config.engine import EngineConfig
from quire.config.memory import MemoryPlan
from quire.config.model import ModelConfig
from quire.engine.executor import PreparesMore
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.generation import check_generation_config, read_sampling_defaults
from quire.runtime.loading.progress import Progress
from quire.runtime.loading.resolve import resolve_model
from quire.runtime.models.registry import why_silent
from quire.serving.assembly import PlannedEncoder, PlannedEngine, plan_engine, plan_model
from quire.serving.client import EngineClient, InProcessClient
from quire.serving.encoding import LoadedTexts
from quire.serving.pooled_texts import TextReader
from quire.serving.process.grammar_check import GrammarChecker
from quire.serving.requests import RequestMaker
from quire.serving.terminal import LoadingProgress
from quire.serving.text.token_table import vocabulary_source
from quire.serving.text.tokenizer import Tokenizer, load_tokenizer
from quire.serving.vllm_arguments import check_encoder, take_task, translate_arguments
from quire.types.errors import ConfigError
from quire.types.sampling_defaults import SamplingDefaults

if TYPE_CHECKING:
    from quire.serving.vision.messages import ImageTaker

logger = logging.getLogger("quire")

LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model with its engine, tokenizer and request maker. `close` frees its memory."""

    files: ModelFiles
    model_config: ModelConfig
    config: EngineConfig
    memory_plan: MemoryPlan
    sampling_defaults: SamplingDefaults
    tokenizer: Tokenizer | None
    checker: GrammarChecker | None
    requests: RequestMaker
    client: EngineClient
    pooling: PoolingModel | None = None  # how a pooling task pools token vectors; None: the model generates text
    why_silent: str | None = None  # why the model generates no text; None: it does
    images: ImageTaker | None = None  # reads the images of messages; None: the model takes no images

    @property
    def name(self) -> str:
        return self.files.name

    def close(self) -> None:
        """Free weights, cache and devices. Idempotent."""
        self.client.close()
        if self.checker is not None:
            self.checker.close()


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A loaded encoder that embeds or classifies texts. `close` frees its memory."""

    name: str
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    texts: LoadedTexts

    def close(self) -> None:
        """Free weights and device. Idempotent."""
        self.texts.encoder.close()


@overload
def load_model(arguments: Mapping[str, Any], *, offline: Literal[False]) -> LoadedModel: ...
@overload
def load_model(arguments: Mapping[str, Any], *, offline: Literal[True] = True) -> LoadedModel | LoadedEncoder: ...
def load_model(arguments: Mapping[str, Any], *, offline: bool = True) -> LoadedModel | LoadedEncoder:
    """Load the model that the arguments of `LLM` describe. Raises ConfigError, DoesNotFit or ModelLoadError.

    `offline`: for an LLM, which gets requests in batches. Otherwise for an AsyncLLM, which streams tokens of single
    requests, and the model must generate text.
    """
    others, asked_by, task = take_task(arguments)
    given = translate_arguments(others)
    model, tokenizer = _as_name("model", given.pop("model", None)), _as_name("tokenizer", given.pop("tokenizer", None))
    skips_tokenizer = bool(given.pop("skip_tokenizer_init", False))
    load_format = _read_load_format(given.pop("load_format", "auto"))
    verbose, generation_config = given.pop("verbose", None), given.pop("generation_config", None) or "auto"
    override = given.pop("override_generation_config", None)
    check_generation_config(generation_config, override)
    is_shown = sys.stderr.isatty() if verbose is None else bool(verbose)
    with closing(LoadingProgress(shown=is_shown)) as progress:
        files = resolve_model(model, progress=progress)
        progress.close()
        settings = EngineArguments(**given, task=task)
        planned = _plan(files, settings, asked_by, offline=offline)
        if isinstance(planned, PlannedEncoder):
            check_encoder(arguments)
        defaults = read_sampling_defaults(files, generation_config, override)
        if isinstance(planned, PlannedEngine):
            if is_shown:
                print(planned.memory, file=sys.stderr)
            logger.info("%s", planned.memory)
        text: Tokenizer | None = None
        if not skips_tokenizer:
            named = None if tokenizer is None else resolve_model(tokenizer, progress=progress, setting="tokenizer")
            text = load_tokenizer(named or files)
        if isinstance(planned, PlannedEncoder):
            return _load_encoder(planned, text, load_format, progress)
        loaded = _load_engine(planned, text, defaults, load_format, progress)
        return _with_images(loaded, settings)


def _plan(
    files: ModelFiles, settings: EngineArguments, asked_by: str, *, offline: bool
) -> PlannedEngine | PlannedEncoder:
    """Plan the model's engine or encoder. Errors name `asked_by`, the argument that selected the task."""
    if not offline and settings.task not in ("auto", "generate"):
        raise ConfigError(asked_by, "is not 'generate', and requests one by one generate text", "use LLM, or a server")
    try:
        return (plan_model if offline else plan_engine)(files, settings, offline=offline)
    except ConfigError as error:
        if error.setting != "task":
            raise
        raise ConfigError(asked_by, error.reason, error.fix) from None


def _with_images(loaded: LoadedModel, settings: EngineArguments) -> LoadedModel:
    """Return `loaded` with readers for images and media sources if the model takes images."""
    limits = loaded.config.scheduler.images
    if limits is None:
        return loaded
    from quire.serving.vision.image_reader import ImageReader  # imported late: only for models that take images
    from quire.serving.vision.messages import ImageTaker
    from quire.serving.vision.sources import MediaSources, read_media_folder

    loaded.requests.images = reader = ImageReader(limits)
    sources = MediaSources(read_media_folder(settings.allowed_local_media_path), reader.max_bytes)
    return replace(loaded, images=ImageTaker(reader, sources))


def _load_engine(
    planned: PlannedEngine,
    text: Tokenizer | None,
    defaults: SamplingDefaults,
    load_format: LoadFormat,
    progress: Progress,
) -> LoadedModel:
    vocabulary = None if text is None else vocabulary_source(text)
    checker = None if vocabulary is None else GrammarChecker(vocabulary)
    requests = RequestMaker(text, planned.model.eos_ids, checker)
    core = planned.build(load_format, progress, planned.tools(vocabulary))
    if isinstance(core.executor, PreparesMore):
        core.executor.compile_remaining()
    return LoadedModel(
        files=planned.files,
        model_config=planned.model,
        config=planned.config,
        memory_plan=planned.memory,
        sampling_defaults=defaults,
        tokenizer=text,
        checker=checker,
        requests=requests,
        client=InProcessClient(core),
        pooling=planned.pooling,
        why_silent=why_silent(planned.model.architecture),
    )


def _load_encoder(
    planned: PlannedEncoder, text: Tokenizer | None, load_format: LoadFormat, progress: Progress
) -> LoadedEncoder:
    encoder = planned.build(load_format, progress)
    model = planned.pooling
    texts = LoadedTexts(encoder, planned.config, model, TextReader(model, text))
    return LoadedEncoder(planned.files.name, planned.model, text, texts)


def _as_name(argument: str, given: str | os.PathLike[str] | None) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(argument, f"cannot be a {type(given).__name__}", "give a path or a name")
    return os.fspath(given)


def _read_load_format(name: object) -> LoadFormat:
    if name in ("auto", None, "safetensors", "gguf", "hf"):  # the format is detected from the files
        return "auto"
    if name == "dummy":
        return "dummy"
    raise ConfigError("load_format", f"{name!r} is unknown", 'use "auto" or "dummy"')
