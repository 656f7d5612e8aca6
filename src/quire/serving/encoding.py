"""Embeddings, scores and classes of the offline API: tokenizes and checks texts, encodes them in batches and pools the
result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.config.embedding import EncoderConfig, PoolingModel, describe_decoder_pooling
from quire.config.model import ModelConfig
from quire.runtime.encoder.encoder import TextRunner
from quire.runtime.finished_rows import finish_rows
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.hf.pooling_task import read_pooling_settings
from quire.serving.client import EngineClient
from quire.serving.pooled_texts import NOTHING_SAMPLED, PooledText, TextReader
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import QuireError
from quire.types.pooling import PoolingParams
from quire.types.request import Abort, Submit, pack_tokens

Advance = Callable[[int], None]  # called with how many texts are done


@dataclass(frozen=True, slots=True)
class LoadedTexts:
    """A loaded encoder, and the reader that tokenizes and checks texts for it."""

    encoder: TextRunner
    config: EncoderConfig
    model: PoolingModel
    reader: TextReader

    def run(
        self, texts: Sequence[PooledText], params: PoolingParams, advance: Advance | None = None
    ) -> list[list[float]]:
        """Return one row of values for each text, in order. `advance` is called with the number of texts done."""
        ids = [text.token_ids for text in texts]
        firsts: list[int] = []
        if any(text.first_part is not None for text in texts):
            firsts = [len(text.token_ids) if text.first_part is None else text.first_part for text in texts]
        found: list[list[float]] = [[] for _ in texts]
        done = 0
        for batch, rows in self.encoder.run(ids, first_parts=firsts):
            for text, row in zip(batch, finish_rows(rows.numpy(), self.model.settings, params).tolist(), strict=True):
                found[text] = row
            done += len(batch)
            if advance is not None:
                advance(done)
        return found


class DecoderTexts:
    """Embeds or scores texts with a decoder. Texts run as prompts, so they share batches and the prefix cache."""

    def __init__(self, client: EngineClient, model: PoolingModel, reader: TextReader) -> None:
        self._client, self.model, self.reader = client, model, reader

    def run(
        self, texts: Sequence[PooledText], params: PoolingParams, advance: Advance | None = None
    ) -> list[list[float]]:
        """Return one row of values for each text, in order. An exception aborts all requests of the call."""
        client = self._client
        numbers = {f"embed-{number}": number for number in range(len(texts))}
        found = np.empty((len(texts), self.model.size), np.float32)
        waiting = set(numbers)
        try:
            for name, text in zip(numbers, texts, strict=True):
                work = self.reader.work([text], params)
                client.submit(Submit(name, pack_tokens(text.token_ids), NOTHING_SAMPLED, pooling=work))
            while waiting:
                for end in client.receive().finished:
                    if end.error is not None:
                        raise QuireError(end.error)
                    found[numbers[end.request_id]] = np.frombuffer(end.pooled, np.float32)
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
    client: EngineClient,
    files: ModelFiles,
    config: ModelConfig,
    max_model_len: int,
    tokenizer: Tokenizer | None,
) -> DecoderTexts:
    """Return the embedding model, or scoring model if the files describe one, of a decoder that was loaded without a
    task."""
    settings = read_pooling_settings(files, "pooling")
    assert settings is not None
    model = describe_decoder_pooling(config, settings, max_model_len)
    return DecoderTexts(client, model, TextReader(model, tokenizer))
