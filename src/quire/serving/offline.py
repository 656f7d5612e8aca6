"""The base class of LLM: embeddings, classification and scores, which both encoders and generating models offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TypeAlias, Unpack

import numpy as np

from quire.config.engine import EngineConfig
from quire.config.memory import MemoryPlan
from quire.serving.chat_tokenizer import ChatTokenizer
from quire.serving.client import CLOSED, EngineClient
from quire.serving.encoding import DecoderTexts, LoadedTexts, decoder_texts
from quire.serving.loading import LoadedEncoder, LoadedModel
from quire.serving.pooled_texts import PooledText, TextReader, check_scores, check_task, cosines, pair_up
from quire.serving.requests import Prompt, PromptLike, RequestMaker, read_prompts, refuse_salts
from quire.serving.terminal import ProgressLine
from quire.serving.text.tokenizer import Tokenizer
from quire.serving.vllm_arguments import CallArguments, check_call
from quire.types.errors import ConfigError, EngineDead, InvalidRequest, QuireError
from quire.types.pooling import (
    Classification,
    ClassificationOutput,
    Embedding,
    EmbeddingOutput,
    Pooled,
    PoolingOutput,
    PoolingParams,
    Score,
    ScoreOutput,
)

ShowsProgress: TypeAlias = bool | Callable[..., object] | None


class OfflineModel:
    """A loaded model. Attributes for generating text exist only if the model generates; for an encoder, accessing them
    raises InvalidRequest."""

    config: EngineConfig
    memory_plan: MemoryPlan
    _client: EngineClient
    _requests: RequestMaker

    def __init__(self, loaded: LoadedModel | LoadedEncoder) -> None:
        self._loaded, self._is_closed = loaded, False
        self.model_config, self._tokenizer = loaded.model_config, loaded.tokenizer
        if isinstance(loaded, LoadedModel):
            self.config, self.memory_plan = loaded.config, loaded.memory_plan
            self._client, self._requests = loaded.client, loaded.requests

    def embed(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ShowsProgress = None,
        **others: Unpack[CallArguments],
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of texts or token ids, in order, pooled as the model's files define it. A model that
        generates text gives the hidden state of the last token.

        A text with more tokens than the model takes is refused before anything runs, unless `truncate_prompt_tokens` is
        how many of its tokens to keep; -1: as many as the model takes.
        """
        check_call(others)
        loaded, params = self._encoder(), pooling_params or PoolingParams()
        check_task(loaded.model, classifies=False)
        loaded.reader.check_dimensions(params.dimensions)
        texts = loaded.reader.read(_read(prompts), "prompts", truncate_prompt_tokens)
        rows = self._rows(loaded, texts, params, use_tqdm)
        return [EmbeddingOutput(Embedding(row), *shown(text)) for text, row in zip(texts, rows, strict=True)]

    def classify(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ShowsProgress = None,
        **others: Unpack[CallArguments],
    ) -> list[ClassificationOutput]:
        """Return the probabilities of every text's labels. Needs a classifier, for example a
        BertForSequenceClassification."""
        check_call(others)
        loaded = self._encoder()
        check_task(loaded.model, classifies=True)
        texts = loaded.reader.read(_read(prompts), "prompts", truncate_prompt_tokens)
        rows, classes = self._rows(loaded, texts, pooling_params, use_tqdm), loaded.model.settings.classes
        labels = () if classes is None else classes.labels
        return [
            ClassificationOutput(Classification(row, labels), *shown(text))
            for text, row in zip(texts, rows, strict=True)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ShowsProgress = None,
        **others: Unpack[CallArguments],
    ) -> list[ScoreOutput]:
        """Return the similarity of pairs of texts: one text paired with each of several, or lists of equal length.

        A cross-encoder (a classifier with one label) reads both texts of a pair at once. For an embedding model the
        score is the cosine of the two embeddings.
        """
        check_call(others)
        loaded = self._encoder()
        check_scores(loaded.model)
        second = read_texts(data_2, "data_2")
        first = pair_up(read_texts(data_1, "data_1"), second, "data_1")
        if loaded.model.task == "classify":
            texts = loaded.reader.pairs(first, second, "data_2", truncate_prompt_tokens)
            scores = [row[0] for row in self._rows(loaded, texts, pooling_params, use_tqdm)]
            return [ScoreOutput(Score(score), *shown(text)) for text, score in zip(texts, scores, strict=True)]
        sides = [
            loaded.reader.read([Prompt(text=text) for text in side], where, truncate_prompt_tokens)
            for side, where in ((first, "data_1"), (second, "data_2"))
        ]
        rows = np.asarray(self._rows(loaded, [*sides[0], *sides[1]], pooling_params, use_tqdm))
        found = cosines(rows[: len(first)], rows[len(first) :])
        return [
            ScoreOutput(Score(score), None, one.token_ids + other.token_ids)
            for score, one, other in zip(found, *sides, strict=True)
        ]

    def encode(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        pooling_task: str | None = None,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: ShowsProgress = None,
        **others: Unpack[CallArguments],
    ) -> list[PoolingOutput[Pooled]]:
        """Return the pooled result of each text as `outputs.data`: an embedding, or probabilities if the model is a
        classifier."""
        check_call(others)
        loaded = self._encoder()
        if pooling_task not in (None, loaded.model.task):
            fix = f"leave it out, or use {loaded.model.task!r}"
            raise InvalidRequest("pooling_task", f"{pooling_task!r:.80} is not what this model does", fix)
        texts = loaded.reader.read(_read(prompts), "prompts", truncate_prompt_tokens)
        rows = self._rows(loaded, texts, pooling_params, use_tqdm)
        return [PoolingOutput(Pooled(row), *shown(text)) for text, row in zip(texts, rows, strict=True)]

    def _encoder(self) -> LoadedTexts | DecoderTexts:
        self._check_open()
        loaded = self._loaded
        if isinstance(loaded, LoadedEncoder):
            return loaded.texts
        if loaded.pooling is not None:
            return DecoderTexts(loaded.client, loaded.pooling, TextReader(loaded.pooling, loaded.tokenizer))
        length = loaded.config.scheduler.max_model_len
        return decoder_texts(loaded.client, loaded.files, loaded.model_config, length, loaded.tokenizer)

    def _alone(self) -> AbstractContextManager[None]:
        """Return a context in which no other call may run."""
        return nullcontext()

    def _rows(
        self,
        loaded: LoadedTexts | DecoderTexts,
        texts: Sequence[PooledText],
        params: PoolingParams | None,
        use_tqdm: ShowsProgress,
    ) -> list[list[float]]:
        params = params or PoolingParams()
        loaded.reader.check_params(params)
        with (
            self._alone(),
            ProgressLine("embedding", len(texts), shown=None if use_tqdm is None else bool(use_tqdm)) as line,
        ):
            return loaded.run(texts, params, line.update)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("skip_tokenizer_init", "is set, so there is no tokenizer", "leave it out")
        return self._tokenizer

    def get_tokenizer(self) -> ChatTokenizer:
        """Return the tokenizer with the methods of transformers' tokenizers: `apply_chat_template`, `encode`, `decode`,
        `eos_token_id`."""
        return ChatTokenizer(self.tokenizer)

    def close(self) -> None:
        """Free weights, cache and devices. Idempotent."""
        self._is_closed = True
        self._loaded.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDead(CLOSED)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        name = type(self).__name__
        raise QuireError(f"an {name} holds a loaded model and cannot be pickled or copied; make one in each process")

    if not TYPE_CHECKING:  # otherwise mypy would accept every attribute name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise InvalidRequest for a generating attribute of an encoder, AttributeError for any other missing
            one."""
            loaded = self.__dict__.get("_loaded")
            if isinstance(loaded, LoadedEncoder) and name in GENERATING:
                reason = f"{loaded.name} is an encoder: it makes embeddings and generates no text"
                raise InvalidRequest("model", reason, "call embed, or load a model that generates text")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


GENERATING = {"config", "memory_plan", "_client", "_requests", "_templates", "_default_sampling", "_live"}


def shown(text: PooledText) -> tuple[str | None, list[int]]:
    """Return the text and the token ids that an output reports."""
    return text.text, text.token_ids


def read_texts(given: str | Sequence[str], where: str) -> list[str]:
    """Return one text or several as a list. Raises InvalidRequest."""
    texts = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(where, "must be a text or a list of texts", "pass at least one")
    return texts


def _read(prompts: PromptLike | Iterable[PromptLike]) -> list[Prompt]:
    read = read_prompts(prompts)
    refuse_salts(read)
    return read
