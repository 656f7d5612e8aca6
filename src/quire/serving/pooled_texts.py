"""Tokenizes texts and pairs of texts, and checks them, for a model that embeds or classifies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.config.embedding import PoolingModel
from quire.serving.requests import Prompt
from quire.serving.text.score_prompt import AFTER, BEFORE, pair_text
from quire.serving.text.tokenizer import Tokenizer
from quire.types.errors import InvalidRequest
from quire.types.pooling import PoolingParams, PoolingWork
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

MOST_TEXTS = 64  # of one engine request
NOTHING_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)  # the sampling of pooling requests
Rows = npt.NDArray[np.floating]  # [texts, size]


class TextTooLong(InvalidRequest):
    """A text has more tokens than the model takes."""


@dataclass(frozen=True, slots=True)
class PooledText:
    """The tokens of a text or of a pair of texts. Of a pair, the first `first_part` tokens are the first text."""

    token_ids: list[int]
    first_part: int | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class TextReader:
    """Tokenizes and checks the texts of a request. `advice` is the hint in errors about how to truncate a long text."""

    model: PoolingModel
    tokenizer: Tokenizer | None
    advice: str = "set truncate_prompt_tokens=-1 to keep its beginning"
    max_tokens: int | None = None  # of all pairs together; None: any number

    def read(
        self, prompts: Sequence[Prompt], where: str, truncate: int | None = None, *, add_special_tokens: bool = True
    ) -> list[PooledText]:
        """Return the tokens of each prompt. `truncate` is how many tokens of a longer text are kept; -1: as many as the
        model takes; None: it is refused. Raises InvalidRequest."""
        most = self.read_truncate(truncate)
        texts = self._lowered([prompt.text or "" for prompt in prompts if prompt.token_ids is None], where)
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens) if self.tokenizer and texts else []
        if most is not None and self.tokenizer is not None:
            encoded = [
                self.tokenizer.shortened(ids, most) if add_special_tokens else ids[:most] for ids in encoded
            ]  # fmt: skip
        found = iter(encoded)
        read = [
            PooledText(next(found) if one.token_ids is None else list(one.token_ids[:most]), text=one.text)
            for one in prompts
        ]
        self._check(read, where)
        return read

    def pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], where: str, truncate: int | None = None
    ) -> list[PooledText]:
        """Return the tokens of each pair, joined by the model's tokenizer, or in the prompt of a decoder that answers
        yes or no. Truncation shortens the longer text, or the end of the document in a prompt. Raises InvalidRequest at
        the first pair that is refused; later pairs are not tokenized."""
        most = self.read_truncate(truncate)
        texts = self._lowered([*firsts, *seconds], where)
        assert self.tokenizer is not None
        read: list[PooledText] = []
        num_tokens = 0
        join = self.tokenizer.encode_pairs if self.model.settings.answers is None else self._asked
        for ids, first in join(texts[: len(firsts)], texts[len(firsts) :], most):
            place = f"{where}[{len(read)}]" if len(seconds) > 1 else where
            check_tokens(self.model, ids, place, self.advice)
            num_tokens += len(ids)
            check_total(where, num_tokens, self.max_tokens)
            read.append(PooledText(ids, first if self.model.has_pairs else None))
        return read

    def _asked(
        self, firsts: Sequence[str], seconds: Sequence[str], most: int | None
    ) -> Iterator[tuple[list[int], int]]:
        assert self.tokenizer is not None
        before, after = self.tokenizer.encode_batch([BEFORE, AFTER], False)
        room = None if most is None else most - len(before) - len(after)
        if most is not None:
            for query in dict.fromkeys(firsts):
                empty = self.tokenizer.encode(pair_text(query, ""), add_special_tokens=False)
                _check_room(most, len(before) + len(empty) + len(after))
        for query, document in zip(firsts, seconds, strict=True):
            inner = self.tokenizer.encode(pair_text(query, document), add_special_tokens=False)
            yield [*before, *inner[:room], *after], len(before)

    def work(self, texts: Sequence[PooledText], params: PoolingParams) -> PoolingWork:
        """Return the pooling work of one engine request that computes these texts together."""
        lengths = tuple(len(text.token_ids) for text in texts)
        firsts: tuple[int, ...] = ()
        if any(text.first_part is not None for text in texts):
            firsts = tuple(
                length if text.first_part is None else text.first_part
                for text, length in zip(texts, lengths, strict=True)
            )
        return PoolingWork(params, lengths, firsts, self.model.settings.pooling.kind, self._answers())

    def _answers(self) -> tuple[int, ...]:
        """Return the token ids of the answers no and yes. Raises InvalidRequest for a word that is not one token."""
        found: list[int] = []
        for answer in self.model.settings.answers or ():
            if not isinstance(answer, str):
                found.append(answer)
                continue
            if self.tokenizer is None:
                raise InvalidRequest("model", "scores by words, but there is no tokenizer", "load it with one")
            ids = self.tokenizer.encode(answer, add_special_tokens=False)
            if len(ids) != 1:
                reason = f"scores by the word {answer!r}, which is {len(ids)} tokens"
                raise InvalidRequest("model", reason, "name words of one token in classifier_from_token of config.json")
            found += ids
        return tuple(found)

    def check_params(self, params: PoolingParams, activation: str = "activate") -> None:
        """Raise InvalidRequest for parameters that do not apply to this model. Errors call `activate` by the name
        `activation`."""
        self.check_dimensions(params.dimensions)
        if self.model.task == "classify" and params.normalize:
            raise InvalidRequest("normalize", "is for embeddings, and this model classifies", "leave it out")
        if self.model.task == "embed" and not params.activate:
            raise InvalidRequest(activation, "is for classifiers, and this model makes embeddings", "leave it out")

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidRequest unless embeddings of this model may be cut to this length."""
        model, allowed = self.model, self.model.settings.dimensions
        if dimensions is None:
            return
        if model.task != "embed":
            raise InvalidRequest("dimensions", "is for embeddings, and this model classifies", "leave it out")
        if allowed is None and dimensions != model.size:
            reason = f"cannot be chosen: the embeddings of this model have {model.size} values and cannot be shortened"
            raise InvalidRequest("dimensions", reason, "leave it out, or use a matryoshka model")
        if dimensions > model.size or (allowed and dimensions not in allowed):
            known = f"one of {', '.join(map(str, allowed))}" if allowed else f"in [1, {model.size}]"
            raise InvalidRequest("dimensions", f"must be {known}, got {dimensions}")

    def read_truncate(self, given: int | None) -> int | None:
        """Return how many tokens of a longer text are kept, or None if it is refused. Raises InvalidRequest."""
        most = self.model.max_model_len
        if given is None:
            return None
        if type(given) is not int or not (given == -1 or 1 <= given <= most):
            reason = f"must be in [1, {most}], or -1 for {most}, got {given!r:.80}"
            raise InvalidRequest("truncate_prompt_tokens", reason)
        return most if given == -1 else given

    def _lowered(self, texts: list[str], where: str) -> list[str]:
        if texts and self.tokenizer is None:
            raise InvalidRequest(where, "are text, but there is no tokenizer", "pass token ids")
        if not self.model.settings.lowercase:
            return texts
        lowered = {text: text.lower() for text in texts}  # one text may be in many pairs
        return [lowered[text] for text in texts]

    def _check(self, texts: Sequence[PooledText], where: str) -> None:
        for place, text in enumerate(texts):
            check_tokens(self.model, text.token_ids, f"{where}[{place}]" if len(texts) > 1 else where, self.advice)


def check_tokens(model: PoolingModel, ids: Sequence[int], where: str, advice: str = "") -> None:
    """Raise InvalidRequest for tokens that the model cannot take, TextTooLong for too many."""
    most, vocab_size = model.max_model_len, model.vocab_size
    if not ids:
        raise InvalidRequest(where, "has no tokens", "pass a text, or token ids")
    if len(ids) > most:
        fix = f"shorten it, or {advice}" if advice else "shorten it"
        raise TextTooLong(where, f"has {len(ids)} tokens, the most are {most}", fix)
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequest(where, f"holds token ids outside [0, {vocab_size})", "use the model's own tokenizer")
    if model.padding_id is not None and model.padding_id in ids:
        reason = f"holds the padding token {model.padding_id}, which this model gives no position"
        raise InvalidRequest(where, reason, "leave it out")


def _check_room(most: int, num_around: int) -> None:
    """Raise InvalidRequest if a prompt of `most` tokens leaves no room for a document: every score would be the
    same."""
    if most <= num_around:
        reason = f"leaves no room for a document: the prompt around it has {num_around} tokens"
        raise InvalidRequest("truncate_prompt_tokens", reason, f"keep more than {num_around}, or shorten the query")


def check_total(where: str, num_tokens: int, limit: int | None) -> None:
    """Raise InvalidRequest if the texts of one request have more tokens than allowed."""
    if limit is not None and num_tokens > limit:
        raise InvalidRequest(where, f"has more than {limit} tokens in all", "send fewer texts at once")


def check_work(model: PoolingModel, request: Submit) -> None:
    """Raise InvalidRequest for a request that an engine with this model cannot compute."""
    work, ids = request.pooling, request.prompt_token_ids
    if work is None:
        raise InvalidRequest("model", "makes embeddings or classifies, and generates no text", "use another endpoint")
    if sum(work.lengths) != len(ids) or len(work.first_parts) not in (0, len(work.lengths)):
        raise InvalidRequest("input", "does not have as many tokens as its lengths add up to", "report this")
    start = 0
    for place, length in enumerate(work.lengths):
        check_tokens(model, ids[start : start + length], f"input[{place}]")
        start += length


def cut_up(texts: Sequence[PooledText], model: PoolingModel) -> list[list[PooledText]]:
    """Split the texts of one request into parts, each computed as one engine request: at most `turn_tokens` tokens of
    the model and MOST_TEXTS texts. The order is kept."""
    parts: list[list[PooledText]] = []
    room = 0
    for text in texts:
        size = len(text.token_ids)
        if size > room or len(parts[-1]) == MOST_TEXTS:
            parts.append([])
            room = model.turn_tokens
        parts[-1].append(text)
        room -= size
    return parts


def check_task(model: PoolingModel, *, classifies: bool) -> None:
    """Raise InvalidRequest unless the model classifies (`classifies` is true) or embeds (it is false)."""
    if classifies and model.task != "classify":
        raise InvalidRequest("model", "makes embeddings and has no labels", "use embed, or a classifier")
    if not classifies and model.task != "embed":
        raise InvalidRequest("model", "is a classifier and makes no embeddings", "use classify or score")


def check_scores(model: PoolingModel) -> None:
    """Raise InvalidRequest for a model that cannot score pairs of texts."""
    if model.task == "classify" and model.size != 1:
        reason = f"is a classifier with {model.size} labels, and a score needs one label"
        raise InvalidRequest("model", reason, "use classify, or a cross-encoder with one label")


def pair_up(first: Sequence[str], second: Sequence[str], where: str = "text_1") -> list[str]:
    """Return one of the first texts for each of the second texts. A single first text is repeated. Raises
    InvalidRequest."""
    if len(first) == 1:
        return list(first) * len(second)
    if len(first) != len(second):
        reason = f"has {len(first)} texts, and the other side has {len(second)}"
        raise InvalidRequest(where, reason, "send one text, or as many as there")
    return list(first)


def cosines(first: Rows, second: Rows) -> list[float]:
    """Return the cosine of each pair of vectors; 0 if one has length 0."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    products = (np.asarray(first, np.float64) * second).sum(axis=1)
    found: list[float] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0).tolist()
    return found
