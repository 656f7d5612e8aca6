"""The state that all handlers of one edge share, and the threads that do text work."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from quire.config.embedding import PoolingModel
from quire.config.server import ServerConfig
from quire.serving.dispatch.dispatcher import Dispatcher
from quire.serving.dispatch.observer import Observer
from quire.serving.dispatch.recent_requests import RecentRequests
from quire.serving.http.adapters import Adapters
from quire.serving.http.batches.runner import BatchRunner
from quire.serving.http.errors import (
    MODEL_NOT_FOUND,
    ApiError,
    engine_unavailable,
    model_not_found,
    too_busy,
    wrong_task,
)
from quire.serving.http.key_ring import KeyRing
from quire.serving.http.limits import Limits
from quire.serving.http.pinned_prefix_file import PinnedPrefixFile
from quire.serving.http.pinned_prefixes import PinnedPrefixes
from quire.serving.http.request_watch import RequestWatch
from quire.serving.http.response_store import ResponseStore
from quire.serving.http.text_threads import LONG_TEXT, TextThreads, num_text_threads
from quire.serving.process.grammar_check import GrammarChecker
from quire.serving.process.link import EngineLink, EngineReady
from quire.serving.process.peers import Peers
from quire.serving.requests import Prompt, RequestMaker
from quire.serving.text.chat_template import ChatTemplate
from quire.serving.text.infill import InfillFormat, infill_format
from quire.serving.text.message_reading import MessageReading
from quire.serving.text.reasoning import ReasoningFormat, reasoning_format
from quire.serving.text.token_table import vocabulary_source
from quire.serving.text.tokenizer import Tokenizer
from quire.serving.text.tool_calls.derived import PROBE_TOOLS
from quire.serving.text.tool_calls.formats import ToolFormat, tool_format
from quire.serving.vision.sources import read_media_folder
from quire.types.errors import ConfigError, InvalidRequest, ModelLoadError
from quire.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults

if TYPE_CHECKING:
    from quire.serving.vision.messages import ImageTaker

logger = logging.getLogger("quire.edge")

SMALL_BODY = 2**16  # bytes: up to this size a body is never refused
_ADDRESSES = ("http://", "https://")  # @huggingface/inference sends the server's address as the name of the model
NAMES_OF_ANY = ("default", "dummy", "tgi")  # huggingface_hub's client sends the last two where no model is named
LARGE_BODY = 2**18  # bytes: above this size, freed memory is returned to the system after the request
_MAY_SHOW_IMAGES = re.compile(  # directly, by reference to a stored response, or with escaped letters
    rb"image|previous_response_id|item_reference|\\u00[2-7]"
)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class BodyPool:
    """The bytes of bodies that are being read or processed, of all requests."""

    max_bytes: int
    num_bytes: int = 0


class BodyMeter:
    """Counts the bytes of one body as they arrive. A small body is never refused, so that large and slow ones cannot
    block others."""

    def __init__(self, pool: BodyPool) -> None:
        self._pool = pool
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count received bytes. Raises ApiError if this body is large and all bodies together exceed the pool."""
        pool = self._pool
        if self.num_bytes + num_bytes > SMALL_BODY and pool.num_bytes + num_bytes > pool.max_bytes:
            raise too_busy("the server is reading too many large requests; try again later", 1)
        pool.num_bytes += num_bytes
        self.num_bytes += num_bytes


def trim_heap() -> None:
    """Return free heap memory to the system, if the C library has malloc_trim."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class ModelText:
    """The model's tokenizer and chat template, and the formats of its answers. Made once and shared by threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        sampling_defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self.tokenizer, self.sampling_defaults = tokenizer, sampling_defaults
        self.checker = GrammarChecker(vocabulary_source(tokenizer))
        self._source = chat_template or tokenizer.chat_template
        self._tool_call_parser, self._reasoning_parser = tool_call_parser, reasoning_parser
        self._makers: dict[tuple[int, ...], RequestMaker] = {}
        self.template_kwargs = dict(template_kwargs or {})
        self._check_template_kwargs()

    def _check_template_kwargs(self) -> None:
        """Raise ConfigError for default template variables that the chat template does not read."""
        for name in self.template_kwargs:
            field = f"default_chat_template_kwargs.{name}"
            try:
                read = self.template.variables
            except InvalidRequest as error:
                raise ConfigError(field, error.reason, "leave it out, or set --chat-template") from None
            if name not in read:
                fix = f"it reads: {', '.join(sorted(read)) or 'none'}"
                raise ConfigError(field, "is not read by the model's chat template", fix)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises InvalidRequest if the model has none or it does not compile."""
        fix = "use /v1/completions, or have the operator set --chat-template"
        if self._source is None:
            raise InvalidRequest("messages", "the model has no chat template", fix)
        tokenizer = self.tokenizer
        bos = None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
        eos = tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else None
        try:
            return ChatTemplate(self._source, bos_token=bos, eos_token=eos)
        except ModelLoadError as error:
            logger.error("%s", error)
            raise InvalidRequest("messages", "the model's chat template does not work", fix) from None

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format in which the model writes tool calls, or None if unknown. Raises InvalidRequest if it has no chat
        template."""
        template = self.template
        render = partial(template.render, tools=PROBE_TOOLS, add_generation_prompt=False)
        return tool_format(
            self._tool_call_parser,
            self._source,
            reads_tools=template.reads_tools,
            render=render if template.writes_calls else None,
        )

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        return reasoning_format(self._reasoning_parser, self._source)

    @property
    def template_source(self) -> str | None:
        """The source of the chat template."""
        return self._source

    @cached_property
    def infill(self) -> InfillFormat | None:
        """The format of infill prompts, or None if the model was not trained to fill in the middle."""
        return infill_format(self.tokenizer)

    def infill_prompt(self, field: str, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> Prompt:
        """Return the prompt for the text between `prefix` and `suffix`. Raises InvalidRequest if the model cannot fill
        in the middle."""
        if self.infill is None:
            reason = "needs a model that fills in the middle, and this one has no tokens for it"
            raise InvalidRequest(field, reason, "leave it out, or serve a model such as qwen2.5-coder")
        return Prompt(token_ids=self.infill.prompt(prefix, suffix, files))

    def has_special_marks(self, reading: MessageReading) -> bool:
        """Whether a mark of reasoning or calls is a special token, so that special tokens must be kept in the text."""
        marks = [] if reading.tools is None else list(reading.tools.marks)
        if reading.reasoning is not None:
            marks += reading.reasoning.marks
        return any(mark in self.tokenizer.special_tokens for mark in marks)

    def special_marks(self, reading: MessageReading) -> tuple[tuple[str, int], ...]:
        """Return the special tokens that occur in the marks of reasoning and calls, with their ids."""
        marks = () if reading.tools is None else reading.tools.marks
        texts = "\n".join((*marks, *(() if reading.reasoning is None else reading.reasoning.marks)))
        return tuple((text, token) for text, token in self.tokenizer.special_tokens.items() if text and text in texts)

    def mark_token(self, mark: str) -> int | None:
        """Return the id of the token whose text is this mark, special or not, or None."""
        token = self.tokenizer.token_id(mark)
        return token if token is not None and self.tokenizer.token_text(token) == mark else None

    def token_marks(self, reading: MessageReading) -> tuple[tuple[str, int], ...]:
        """Return the special tokens in the marks of reasoning and calls, and the tokens that open and end reasoning,
        with their ids."""
        form = reading.reasoning
        marks = () if form is None else (form.start, form.end)
        found = {mark: token for mark in marks if (token := self.mark_token(mark)) is not None}
        return tuple({**dict(self.special_marks(reading)), **found}.items())

    def maker(self, eos_ids: tuple[int, ...]) -> RequestMaker:
        """Return the request maker for a model that ends its texts with `eos_ids`."""
        if eos_ids not in self._makers:
            self._makers = {eos_ids: RequestMaker(self.tokenizer, eos_ids)}
        return self._makers[eos_ids]


@dataclass(slots=True, kw_only=True)
class Service:
    """The parts of one edge. `render_metrics` returns the body and the content type of /metrics."""

    config: ServerConfig
    limits: Limits
    dispatcher: Dispatcher
    link: EngineLink
    texts: ModelText
    observer: Observer
    version: str
    render_metrics: Callable[[], Awaitable[tuple[bytes, str]]]
    ask_drain: Callable[[], None]  # asks the supervisor to shut down the whole server
    peers: Peers  # the other edges
    created: int = field(default_factory=lambda: int(datetime.now(UTC).timestamp()))
    prefix_file: Path | None = None  # file of pinned prompts; None: in memory
    recalls_prefixes: bool = True  # whether this edge pins them again when a new engine is up
    files_directory: Path | None = None  # of uploaded files and batches; None: a temporary one
    bodies: BodyPool = field(init=False)
    pixels: BodyPool = field(init=False)  # bytes of pixels in running requests
    media_folder: str | None = field(init=False)  # folder whose files image URLs may refer to
    uploads: BodyPool = field(init=False)  # separate, so that large uploads cannot block other requests
    batches: BatchRunner = field(init=False)
    threads: TextThreads = field(init=False)
    keys: KeyRing = field(init=False)
    watch: RequestWatch = field(init=False)
    recent_requests: RecentRequests = field(init=False)
    responses: ResponseStore = field(init=False)
    pinned_prefixes: PinnedPrefixes = field(init=False)
    adapters: Adapters = field(init=False)

    def __post_init__(self) -> None:
        self.bodies, self.uploads = (BodyPool(self.limits["bodies_bytes"]) for _ in range(2))
        self.pixels = BodyPool(self.limits["images_bytes"])
        self.media_folder = read_media_folder(self.config.engine.allowed_local_media_path)
        self.threads = TextThreads(num_text_threads(self.config.api_workers))
        self.keys = KeyRing(self.config.access)
        self.watch = RequestWatch(self.observer, logs_all=self.config.access_log)
        self.recent_requests = RecentRequests(self.limits)
        self.responses = ResponseStore(self.limits)
        self.batches = BatchRunner(self.files_directory, self.limits, self.dispatcher, self.config.api_workers)
        self.pinned_prefixes = PinnedPrefixes(self.dispatcher, self.link, self.keys, PinnedPrefixFile(self.prefix_file))
        self.adapters = Adapters(self.dispatcher, self.link, self.config.engine)
        self.dispatcher.on_engine_up = self._on_engine_up

    def _on_engine_up(self) -> None:
        if self.config.engine.enable_lora:
            self.adapters.begin_refresh()
        if self.recalls_prefixes:
            self.pinned_prefixes.recall()

    @property
    def names(self) -> tuple[str, ...]:
        return self.config.source.served_names or (self.config.source.model,)

    @property
    def fingerprint(self) -> str:
        """An id of what may change answers: the version of Quire, the model name, dtype and device."""
        engine = self.dispatcher.known_engine
        facts = (self.version, self.names[0], *((engine.dtype, engine.device) if engine else ()))
        return "quire-" + hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]

    def engine(self) -> EngineReady:
        """Return the sizes of the engine, also while it restarts. Raises ApiError if no engine was up yet."""
        engine = self.dispatcher.known_engine
        if engine is None:
            raise engine_unavailable("the model is still loading; try again soon")
        return engine

    def generating_engine(self) -> EngineReady:
        """Return the engine. Raises ApiError if its model does not generate text."""
        engine = self.engine()
        if engine.pooling is not None:
            raise wrong_task(self.names[0], engine.pooling.task)
        return engine

    def pooling_model(self) -> PoolingModel:
        """Return what the model computes of texts. Raises ApiError if it generates text instead."""
        engine = self.engine()
        if engine.pooling is None:
            raise wrong_task(self.names[0], "generate")
        return engine.pooling

    def served_name(self, asked: str | None) -> str:
        """Return the model name for the response; no name, NAMES_OF_ANY and an address mean the first. Raises ApiError
        for a name that is neither served nor a LoRA adapter known to this edge: see `knowing_adapters`."""
        if asked in self.names or (asked and asked in self.adapters):
            return asked
        is_any = not asked or asked in NAMES_OF_ANY or asked.startswith(_ADDRESSES)
        return self.names[0] if is_any else self._untagged_name(asked or "")

    def adapter_of(self, model: str) -> str:
        """Return the LoRA adapter of a served name; "" for the model itself."""
        return "" if model in self.names else model

    async def knowing_adapters(self, work: Callable[[], Awaitable[R]]) -> R:
        """Run work that looks up a model name. If it fails because the name is unknown, ask the engine for its LoRA
        adapters and, if they have changed, run the work again."""
        before = self.adapters.known
        try:
            return await work()
        except ApiError as error:
            if error.code != MODEL_NOT_FOUND:
                raise
            await self.adapters.refresh()
            if self.adapters.known is before:
                raise
        return await work()

    def _untagged_name(self, asked: str) -> str:
        """Return the served name that equals `asked` except for the tag `:latest`, which Ollama's clients add. Raises
        ApiError if there is none."""
        for name in self.names:
            if name.removesuffix(":latest") == asked.removesuffix(":latest"):
                return name
        if asked.removesuffix(":latest") in self.adapters:
            return asked.removesuffix(":latest")
        raise model_not_found(asked, (*self.names, *self.adapters.known))

    def image_taker(self) -> ImageTaker | None:
        """Return the reader of images in messages, or None if the model takes no images. Raises ApiError if no engine
        was up yet."""
        limits = self.engine().images
        if limits is None:
            return None
        from quire.serving.vision.image_reader import ImageReader  # not imported unless there are images
        from quire.serving.vision.messages import ImageTaker
        from quire.serving.vision.sources import MediaSources

        sizes = (self.limits[name] for name in ("image_bytes", "image_pixels", "images_pixels"))
        reader = ImageReader(limits, *sizes)
        return ImageTaker(reader, MediaSources(self.media_folder, reader.max_bytes))

    @contextmanager
    def holding_pixels(self, num_bytes: int) -> Iterator[None]:
        """Count this many bytes of pixels while the block runs. Raises ApiError if all running requests together exceed
        the limit."""
        pool = self.pixels
        if num_bytes and pool.num_bytes and pool.num_bytes + num_bytes > pool.max_bytes:
            raise too_busy("the server holds too many images; try again later", 1)
        pool.num_bytes += num_bytes
        try:
            yield
        finally:
            pool.num_bytes -= num_bytes

    async def in_thread(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on a short text in a text thread."""
        return await asyncio.wrap_future(self.threads.submit(0, work, *args, **kwargs))

    async def in_thread_of(self, body: bytes, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on the body of a request in a text thread. Long bodies, and bodies with images, whose few bytes may
        take long to decode, run in other threads than short ones."""
        engine, size = self.dispatcher.known_engine, len(body)
        if size <= LONG_TEXT and engine is not None and engine.images is not None and _MAY_SHOW_IMAGES.search(body):
            size = LONG_TEXT + 1
        return await self.in_thread_for(size, work, *args, **kwargs)

    async def in_thread_for(self, num_bytes: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on a text of this many bytes in a text thread. Long texts run in other threads than short ones."""
        return await asyncio.wrap_future(self.threads.submit(num_bytes, work, *args, **kwargs))

    @contextmanager
    def metered(self, *, is_upload: bool = False) -> Iterator[BodyMeter]:
        """Yield the meter of a body that is read and processed while the block runs. Its bytes count towards the limit
        on all bodies, or on all uploads."""
        pool = self.uploads if is_upload else self.bodies
        meter = BodyMeter(pool)
        try:
            yield meter
        finally:
            pool.num_bytes -= meter.num_bytes
            if meter.num_bytes > LARGE_BODY:
                self.threads.submit(0, trim_heap)

    def close(self) -> None:
        self.batches.close()
        self.threads.close()
        self.texts.checker.close()
