"""Embeddings, scores and classes offline: texts are tokenized, checked, encoded in batches and pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.config.embedding import EncoderConfig, PoolingModel
from quire.config.model import ModelConfig
from quire.runtime.encoder.encoder import TextEncoder
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.hf.sentence import read_embedding_settings
from quire.runtime.pooling import finish_rows
from quire.serving.client import EngineClient
from quire.serving.pooled_texts import NOTHING_SAMPLED, PooledText, TextReader
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest, QuireError
from quire.types.pooling import PoolingParams, PoolingWork
from quire.types.request import Abort, Submit, pack_tokens

Advance = Callable[[int], None]  # how many texts are done


@dataclass(frozen=True, slots=True)
class LoadedTexts:
    """A loaded encoder with what reads texts for it."""

    encoder: TextEncoder
    config: EncoderConfig
    model: PoolingModel
    reader: TextReader

    def run(
        self, texts: Sequence[PooledText], params: PoolingParams, advance: Advance | None = None
    ) -> list[list[float]]:
        """One row for each text, in order."""
        ids = [text.token_ids for text in texts]
        firsts: list[int] = []
        if any(text.first_part is not None for text in texts):
            firsts = [len(text.token_ids) if text.first_part is None else text.first_part for text in texts]
        found: list[list[float]] = [[] for _ in texts]
        done = 0
        for batch, rows in self.encoder.run(ids, first_parts=firsts):
            for text, row in zip(batch, finish_rows(rows, self.model.settings, params).tolist(), strict=True):
                found[text] = row
            done += len(batch)
            if advance is not None:
                advance(done)
        return found


class DecoderTexts:
    """Embeddings of a model that generates text: the hidden state of each text's last token. Texts are prompts like
    any others, so they share batches and the prefix cache."""

    def __init__(self, client: EngineClient, model: PoolingModel, reader: TextReader) -> None:
        self._client, self.model, self.reader = client, model, reader

    def run(
        self, texts: Sequence[PooledText], params: PoolingParams, advance: Advance | None = None
    ) -> list[list[float]]:
        """One row for each text, in order. Whatever ends it early ends all of its requests."""
        client = self._client
        numbers = {f"embed-{number}": number for number in range(len(texts))}
        found = torch.empty(len(texts), self.model.size)
        waiting = set(numbers)
        try:
            for name, text in zip(numbers, texts, strict=True):
                work = PoolingWork(params, (len(text.token_ids),))
                client.submit(Submit(name, pack_tokens(text.token_ids), NOTHING_SAMPLED, pooling=work))
            while waiting:
                for end in client.receive().finished:
                    if end.error is not None:
                        raise QuireError(end.error)
                    found[numbers[end.request_id]] = torch.frombuffer(bytearray(end.pooled), dtype=torch.float32)
                    waiting.discard(end.request_id)
                if advance is not None:
                    advance(len(texts) - len(waiting))
        except BaseException:
            for name in waiting:
                client.abort(Abort(name))
            while client.has_work and client.dead is None:
                client.receive()
            raise
        rows: list[list[float]] = finish_rows(found, self.model.settings, params).tolist()
        return rows


def decoder_texts(
    client: EngineClient, files: ModelFiles, config: ModelConfig, max_model_len: int, tokenizer: Tokenizer | None
) -> DecoderTexts:
    """Raises InvalidRequest for a model whose files ask for more than the state of the last token."""
    settings = read_embedding_settings(files)
    if settings.pooling.kind != "last":
        reason = f"generates text, and its files pool by {settings.pooling.kind!r}"
        raise InvalidRequest("model", reason, "use a model that pools by its last token, or an encoder")
    model = PoolingModel(
        task="embed",
        size=config.hidden_size,
        max_model_len=min(max_model_len - 1, settings.max_length or max_model_len),
        vocab_size=config.vocab_size,
        settings=settings,
        has_pairs=False,
    )
    return DecoderTexts(client, model, TextReader(model, tokenizer))
