"""The parameters of pooling requests (embeddings, classification, scores), and the outputs that users get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from quire.types.errors import InvalidRequest

Data = TypeVar("Data")
PoolingKind = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How a text is pooled: into an embedding, or into the logits or probabilities of a classifier."""

    dimensions: int | None = None  # keep the first so many elements of an embedding; None: all
    normalize: bool | None = None  # scale an embedding to length 1; None: as the model's files say
    activate: bool = True  # convert a classifier's logits to probabilities or scores

    def __post_init__(self) -> None:
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise InvalidRequest("dimensions", f"must be a whole number above 0, got {self.dimensions!r:.80}")


@dataclass(frozen=True, slots=True)
class PoolingWork:
    """The texts of one pooling request. They are computed together: their tokens are concatenated."""

    params: PoolingParams
    lengths: tuple[int, ...]  # tokens of each text
    first_parts: tuple[int, ...] = ()  # tokens of the first text of each pair; empty: no pairs
    kind: PoolingKind = "last"  # which hidden states a decoder pools; an encoder follows its files
    answers: tuple[int, ...] = ()  # token ids of "no" and "yes", whose logits give the score; empty: no score


@dataclass(frozen=True, slots=True)
class Embedding:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class Classification:
    """The probability of every label, in the order of the model's labels."""

    probs: list[float]
    labels: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class Score:
    """How well two texts match; higher is better."""

    score: float


@dataclass(frozen=True, slots=True)
class Pooled:
    """An embedding or class probabilities, depending on the model."""

    data: list[float]


@dataclass(frozen=True, slots=True)
class PoolingOutput(Generic[Data]):
    """The pooled output of one text."""

    outputs: Data
    prompt: str | None
    prompt_token_ids: list[int]
    request_id: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput(PoolingOutput[Embedding]):
    """The embedding of one text."""

    @property
    def embedding(self) -> list[float]:
        return self.outputs.embedding


@dataclass(frozen=True, slots=True)
class ClassificationOutput(PoolingOutput[Classification]):
    """The probabilities of one text's labels."""


@dataclass(frozen=True, slots=True)
class ScoreOutput(PoolingOutput[Score]):
    """The score of one pair of texts. `prompt_token_ids` are the tokens of both."""
