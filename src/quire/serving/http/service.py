"""Everything the routes of one edge share, and the threads in which text is worked on."""

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

SMALL_BODY = 2**16  # bytes
LARGE_BODY = 2**18  # bytes: working on one leaves memory behind that is worth giving back
_MAY_SHOW_IMAGES = re.compile(  # by themselves, by reference to a stored response, or spelled with escapes
    rb"image|previous_response_id|item_reference|\\u00[2-7]"
)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class BodyPool:
    """The bytes of bodies that are being read or worked on."""

    max_bytes: int
    num_bytes: int = 0


class BodyMeter:
    """Counts the bytes of one body as they come. A small body is never refused, so that large ones that come slowly
    keep nobody else out."""

    def __init__(self, pool: BodyPool) -> None:
        self._pool = pool
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises ApiError when this body is large and all together become too much."""
        pool = self._pool
        if self.num_bytes + num_bytes > SMALL_BODY and pool.num_bytes + num_bytes > pool.max_bytes:
            raise too_busy("the server is reading too many large requests; try again later", 1)
        pool.num_bytes += num_bytes
        self.num_bytes += num_bytes


def give_back_memory() -> None:
    """Return free memory to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class ModelText:
    """The model's tokenizer and template, and how its answers are read. Made once; used in threads."""

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
        """Raise ConfigError for values that the chat template does not read."""
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
        """Raises InvalidRequest where the model has none that works."""
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
        """How the model writes calls; None: not known. Raises InvalidRequest where it has no chat template."""
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
        """The text of the chat template."""
        return self._source

    @cached_property
    def infill(self) -> InfillFormat | None:
        """How the model is asked to fill in the middle; None: it was not trained to."""
        return infill_format(self.tokenizer)

    def infill_prompt(self, field: str, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> Prompt:
        """The prompt for what is between two texts. Raises InvalidRequest for a model that cannot fill in."""
        if self.infill is None:
            reason = "needs a model that fills in the middle, and this one has no tokens for it"
            raise InvalidRequest(field, reason, "leave it out, or serve a model such as qwen2.5-coder")
        return Prompt(token_ids=self.infill.prompt(prefix, suffix, files))

    def hides(self, reading: MessageReading) -> bool:
        """Whether a mark that is to be read is a special token, so that texts must show those."""
        marks = [] if reading.tools is None else list(reading.tools.marks)
        if reading.reasoning is not None:
            marks += reading.reasoning.marks
        return any(mark in self.tokenizer.special_tokens for mark in marks)

    def special_marks(self, reading: MessageReading) -> tuple[tuple[str, int], ...]:
        """The special tokens in the marks of what is read, with their ids."""
        marks = () if reading.tools is None else reading.tools.marks
        texts = "\n".join((*marks, *(() if reading.reasoning is None else reading.reasoning.marks)))
        return tuple((text, token) for text, token in self.tokenizer.special_tokens.items() if text and text in texts)

    def mark_token(self, mark: str) -> int | None:
        """The token that is this mark, special or not; None: there is none."""
        token = self.tokenizer.token_id(mark)
        return token if token is not None and self.tokenizer.token_text(token) == mark else None

    def token_marks(self, reading: MessageReading) -> tuple[tuple[str, int], ...]:
        """The special tokens in the marks of what is read, and the tokens that open and end reasoning."""
        form = reading.reasoning
        marks = () if form is None else (form.start, form.end)
        found = {mark: token for mark in marks if (token := self.mark_token(mark)) is not None}
        return tuple({**dict(self.special_marks(reading)), **found}.items())

    def maker(self, eos_ids: tuple[int, ...]) -> RequestMaker:
        """For a model that ends its texts with `eos_ids`."""
        if eos_ids not in self._makers:
            self._makers = {eos_ids: RequestMaker(self.tokenizer, eos_ids)}
        return self._makers[eos_ids]


@dataclass(slots=True, kw_only=True)
class Service:
    """One edge's parts. `render_metrics` gives the page /metrics shows and its content type."""

    config: ServerConfig
    limits: Limits
    dispatcher: Dispatcher
    link: EngineLink
    texts: ModelText
    observer: Observer
    version: str
    render_metrics: Callable[[], Awaitable[tuple[bytes, str]]]
    ask_drain: Callable[[], None]  # an admin wants the whole server to shut down
    peers: Peers  # the other edges
    created: int = field(default_factory=lambda: int(datetime.now(UTC).timestamp()))
    prefix_file: Path | None = None  # where resident prompts are written down; None: in memory
    recalls_prefixes: bool = True  # it is this edge that registers them with a new engine
    files_directory: Path | None = None  # of uploaded files and batches; None: a temporary one
    bodies: BodyPool = field(init=False)
    pixels: BodyPool = field(init=False)  # of images in requests that run
    media_folder: str | None = field(init=False)  # whose files image URLs may name
    uploads: BodyPool = field(init=False)  # apart: the largest bodies keep only each other out
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
        """Changes with what may change answers: the version, the model and how it is run."""
        engine = self.dispatcher.known_engine
        facts = (self.version, self.names[0], *((engine.dtype, engine.device) if engine else ()))
        return "quire-" + hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]

    def engine(self) -> EngineReady:
        """What is known of the engine, also while it is restarted. Raises ApiError before it was ever up."""
        engine = self.dispatcher.known_engine
        if engine is None:
            raise engine_unavailable("the model is still loading; try again soon")
        return engine

    def generating_engine(self) -> EngineReady:
        """The engine, where its model generates text. Raises ApiError where it does not."""
        engine = self.engine()
        if engine.pooling is not None:
            raise wrong_task(self.names[0], engine.pooling.task)
        return engine

    def pooling_model(self) -> PoolingModel:
        """What the model makes of texts. Raises ApiError where it generates text instead."""
        engine = self.engine()
        if engine.pooling is None:
            raise wrong_task(self.names[0], "generate")
        return engine.pooling

    def served_name(self, asked: str | None) -> str:
        """The name that responses carry; nothing and `default` stand for the first. Raises ApiError for a model that is
        not served here, and is no LoRA adapter that is known: see `knowing_adapters`."""
        if asked in self.names:
            return asked
        if not asked or asked == "default":
            return self.names[0]
        return asked if asked in self.adapters else self._untagged_name(asked)

    def adapter_of(self, model: str) -> str:
        """The LoRA adapter of a served name; "": the model itself."""
        return "" if model in self.names else model

    async def knowing_adapters(self, work: Callable[[], Awaitable[R]]) -> R:
        """Do work that names a model. If this edge does not know the model, it may be a LoRA adapter that was loaded
        since: ask the engine, and do the work once more."""
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
        """The served name that is the same but for the tag `:latest`, which Ollama's clients add to names without
        one."""
        for name in self.names:
            if name.removesuffix(":latest") == asked.removesuffix(":latest"):
                return name
        if asked.removesuffix(":latest") in self.adapters:
            return asked.removesuffix(":latest")
        raise model_not_found(asked, (*self.names, *self.adapters.known))

    def image_taker(self) -> ImageTaker | None:
        """What reads the images of messages; None: the model takes none. Raises ApiError before the engine was ever
        up."""
        limits = self.engine().images
        if limits is None:
            return None
        from quire.serving.vision.image_reader import ImageReader  # needless where there are no images
        from quire.serving.vision.messages import ImageTaker
        from quire.serving.vision.sources import MediaSources

        sizes = (self.limits[name] for name in ("image_bytes", "image_pixels", "images_pixels"))
        reader = ImageReader(limits, *sizes)
        return ImageTaker(reader, MediaSources(self.media_folder, reader.max_bytes))

    @contextmanager
    def holding_pixels(self, num_bytes: int) -> Iterator[None]:
        """While a request with so many bytes of pixels runs. Raises ApiError when all together become too much."""
        pool = self.pixels
        if num_bytes and pool.num_bytes and pool.num_bytes + num_bytes > pool.max_bytes:
            raise too_busy("the server holds too many images; try again later", 1)
        pool.num_bytes += num_bytes
        try:
            yield
        finally:
            pool.num_bytes -= num_bytes

    async def in_thread(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on text off the event loop."""
        return await asyncio.wrap_future(self.threads.submit(0, work, *args, **kwargs))

    async def in_thread_of(self, body: bytes, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on the body of a request off the event loop. Long bodies and those with images, of which a few bytes
        may take long to decode, never hold up short ones."""
        engine, size = self.dispatcher.known_engine, len(body)
        if size <= LONG_TEXT and engine is not None and engine.images is not None and _MAY_SHOW_IMAGES.search(body):
            size = LONG_TEXT + 1
        return await self.in_thread_for(size, work, *args, **kwargs)

    async def in_thread_for(self, num_bytes: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on a text of so many bytes off the event loop. Long texts never hold up short ones."""
        return await asyncio.wrap_future(self.threads.submit(num_bytes, work, *args, **kwargs))

    @contextmanager
    def metered(self, *, is_upload: bool = False) -> Iterator[BodyMeter]:
        """While a body is read and worked on; what has come of it counts against all bodies, or uploads, together."""
        pool = self.uploads if is_upload else self.bodies
        meter = BodyMeter(pool)
        try:
            yield meter
        finally:
            pool.num_bytes -= meter.num_bytes
            if meter.num_bytes > LARGE_BODY:
                self.threads.submit(0, give_back_memory)

    def close(self) -> None:
        self.batches.close()
        self.threads.close()
        self.texts.checker.close()
