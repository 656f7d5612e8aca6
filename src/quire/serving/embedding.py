"""From prompts to embeddings: tokenized, checked, encoded in batches, pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from quire.config.embedding import EmbeddingSettings, EncoderConfig
from quire.config.model import ModelConfig
from quire.runtime.encoder.encoder import TextEncoder
from quire.runtime.pooling import pool
from quire.serving.requests import Prompt
from quire.serving.text.tokenizer import Tokenizer
from quire.types.embedding import EmbeddingOutput
from quire.types.errors import InvalidRequest

Advance = Callable[[int], None]  # how many texts are done


@dataclass(frozen=True, slots=True)
class Embedder:
    """A loaded encoder with its tokenizer and the way its makers pool."""

    encoder: TextEncoder
    model: ModelConfig
    config: EncoderConfig
    settings: EmbeddingSettings
    tokenizer: Tokenizer | None

    def embed(
        self, prompts: Sequence[Prompt], truncate: int | None = None, advance: Advance | None = None
    ) -> list[EmbeddingOutput]:
        """One output for each prompt, in order. Raises InvalidRequest before anything is computed.

        `truncate`: how many tokens of a longer text are kept, -1 for as many as the model takes.
        """
        texts = self._tokenize(prompts, self._read_truncate(truncate))
        for i, ids in enumerate(texts):
            self._check(ids, f"prompts[{i}]" if len(texts) > 1 else "prompts")
        found: list[list[float]] = [[] for _ in texts]
        done = 0
        for batch, vectors in self.encoder.run(texts, partial(pool, pooling=self.settings.pooling)):
            for text, vector in zip(batch, vectors.tolist(), strict=True):
                found[text] = vector
            done += len(batch)
            if advance is not None:
                advance(done)
        return [
            EmbeddingOutput(vector, prompt.text, ids) for vector, prompt, ids in zip(found, prompts, texts, strict=True)
        ]

    def _read_truncate(self, given: int | None) -> int | None:
        most = self.config.max_model_len
        if given is None:
            return None
        if type(given) is not int or not (given == -1 or 1 <= given <= most):
            reason = f"must be in [1, {most}], or -1 for {most}, got {given!r:.80}"
            raise InvalidRequest("truncate_prompt_tokens", reason)
        return most if given == -1 else given

    def _tokenize(self, prompts: Sequence[Prompt], truncate: int | None) -> list[list[int]]:
        texts = [prompt.text or "" for prompt in prompts if prompt.token_ids is None]
        if texts and self.tokenizer is None:
            raise InvalidRequest("prompts", "are text, but there is no tokenizer", "pass token ids")
        if self.settings.lowercase:
            texts = [text.lower() for text in texts]
        encoded = self.tokenizer.encode_batch(texts) if self.tokenizer and texts else []
        if truncate is not None and self.tokenizer is not None:
            encoded = [self.tokenizer.shortened(ids, truncate) for ids in encoded]
        found = iter(encoded)
        return [next(found) if prompt.token_ids is None else list(prompt.token_ids[:truncate]) for prompt in prompts]

    def _check(self, ids: Sequence[int], where: str) -> None:
        most, vocab_size = self.config.max_model_len, self.model.vocab_size
        if not ids:
            raise InvalidRequest(where, "has no tokens", "pass a text, or token ids")
        if len(ids) > most:
            reason = f"has {len(ids)} tokens, the most are {most}"
            raise InvalidRequest(where, reason, "shorten it, or set truncate_prompt_tokens=-1 to embed its beginning")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequest(where, f"holds token ids outside [0, {vocab_size})", "use the model's own tokenizer")
        offset = 0 if self.model.encoder is None else self.model.encoder.position_offset
        if offset and offset - 1 in ids:
            reason = f"holds the padding token {offset - 1}, which this model gives no position"
            raise InvalidRequest(where, reason, "leave it out")
