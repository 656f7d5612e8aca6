"""A model that is loaded in this process: what can be asked of it whether it generates text or makes embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TypeAlias, Unpack

from quire.config.engine import EngineConfig
from quire.config.memory import MemoryPlan
from quire.serving.chat_tokenizer import ChatTokenizer
from quire.serving.client import EngineClient
from quire.serving.loading import LoadedEncoder, LoadedModel
from quire.serving.requests import PromptLike, RequestMaker, read_prompts, refuse_salts
from quire.serving.terminal import ProgressLine
from quire.serving.text.tokenizer import Tokenizer
from quire.serving.vllm_arguments import CallArguments, check_call
from quire.types.embedding import EmbeddingOutput
from quire.types.errors import ConfigError, InvalidRequest

ShowsProgress: TypeAlias = bool | Callable[..., object] | None


class OfflineModel:
    """A loaded model. What generates text is there only where it does; an encoder refuses whoever asks for it."""

    config: EngineConfig
    memory_plan: MemoryPlan
    _client: EngineClient
    _requests: RequestMaker

    def __init__(self, loaded: LoadedModel | LoadedEncoder) -> None:
        self._loaded = loaded
        self.model_config, self._tokenizer = loaded.model_config, loaded.tokenizer
        if isinstance(loaded, LoadedModel):
            self.config, self.memory_plan = loaded.config, loaded.memory_plan
            self._client, self._requests = loaded.client, loaded.requests

    def embed(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ShowsProgress = None,
        **others: Unpack[CallArguments],
    ) -> list[EmbeddingOutput]:
        """The embeddings of texts or token ids, in their order, pooled as the model's files say. Needs an encoder.

        A text with more tokens than the model takes is refused before anything runs, unless `truncate_prompt_tokens`
        says how many are kept of it: -1 for as many as the model takes.
        """
        check_call(others)
        loaded = self._loaded
        if not isinstance(loaded, LoadedEncoder):
            reason = f"{loaded.name} generates text, and embeddings of such models are not supported yet"
            raise InvalidRequest("model", reason, "load an encoder, such as a BERT or a MiniLM")
        read = read_prompts(prompts)
        refuse_salts(read)
        with ProgressLine("embedding", len(read), shown=None if use_tqdm is None else bool(use_tqdm)) as line:
            return loaded.embedder.embed(read, truncate_prompt_tokens, line.update)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("skip_tokenizer_init", "is set, so there is no tokenizer", "leave it out")
        return self._tokenizer

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer with the calls of transformers: `apply_chat_template`, `encode`, `decode`, `eos_token_id`."""
        return ChatTokenizer(self.tokenizer)

    def close(self) -> None:
        """Give back weights, cache and devices. Idempotent."""
        self._loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    if not TYPE_CHECKING:  # with it, every name would be an attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Called for what there is not."""
            loaded = self.__dict__.get("_loaded")
            if isinstance(loaded, LoadedEncoder) and name in GENERATING:
                reason = f"{loaded.name} is an encoder: it makes embeddings and generates no text"
                raise InvalidRequest("model", reason, "call embed, or load a model that generates text")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


GENERATING = {"config", "memory_plan", "_client", "_requests", "_templates", "_default_sampling", "_live"}
