"""The recorded outputs of the model and the grammars, by request, sample and place. The place of a token is its index
in the output of its sample."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.types.step import Floats, Ints

Sample = tuple[int, int]  # the ordinal of a request and the index of its sample


class BeamCandidates(NamedTuple):
    """The most likely next tokens of a search's beams, in the order of the beams, and the token sampled for each
    beam."""

    token_ids: Ints  # [beams, k]
    scores: Floats  # [beams, k]
    sampled: tuple[int, ...]


class Failure(NamedTuple):
    """The failure of a sample at `place`."""

    place: int  # -1: while its prompt is computed
    reason: str


@dataclass(slots=True)
class GrammarResults:
    """The recorded results of a request's grammar. Keys are digests of the tokens that a sample had generated."""

    over: set[str] = field(default_factory=set)
    forced: dict[str, tuple[int, ...]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    refused: set[tuple[str, int]] = field(default_factory=set)  # (digest, refused token)


@dataclass(slots=True)
class ModelOutputs:
    """All recorded outputs. A sample that generates more tokens than were recorded continues with a filler token that
    does not end it."""

    tokens: defaultdict[Sample, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[tuple[int, int, int], float] = field(default_factory=dict)
    beams: dict[tuple[int, int], BeamCandidates] = field(default_factory=dict)  # by ordinal and place
    drafts: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    failures: dict[Sample, Failure] = field(default_factory=dict)
    grammars: defaultdict[int, GrammarResults] = field(default_factory=lambda: defaultdict(GrammarResults))
    fillers: dict[int, int] = field(default_factory=dict)  # by ordinal; only of requests that token 0 would end

    def add_tokens(self, sample: Sample, place: int, ids: list[int]) -> None:
        """Set the tokens of a sample from `place` on, replacing earlier ones."""
        tokens = self.tokens[sample]
        tokens += [self.filler(sample[0])] * (place - len(tokens))
        tokens[place : place + len(ids)] = ids

    def token(self, ordinal: int, index: int, place: int) -> int:
        tokens = self.tokens.get((ordinal, index), ())
        return tokens[place] if place < len(tokens) else self.filler(ordinal)

    def filler(self, ordinal: int) -> int:
        return self.fillers.get(ordinal, 0)

    def set_end_ids(self, ordinal: int, end_ids: tuple[int, ...]) -> None:
        """Choose a filler token that does not end the request's samples."""
        if 0 in end_ids:
            self.fillers[ordinal] = next(token for token in range(len(end_ids) + 1) if token not in end_ids)

    def beam_candidates(self, ordinal: int, place: int, num_beams: int, width: int) -> BeamCandidates:
        """Return `width` candidates for each of `num_beams` beams. Missing candidates are invented."""
        found = self.beams.get((ordinal, place))
        if found is None or len(found.token_ids) < num_beams:
            first = self.filler(ordinal)
            ids = np.arange(first + 1, first + 1 + width, dtype=np.int32)
            scores = -np.arange(1, width + 1, dtype=np.float32)
            return BeamCandidates(np.tile(ids, (num_beams, 1)), np.tile(scores, (num_beams, 1)), (first,) * num_beams)
        missing = width - found.token_ids.shape[1]
        if missing <= 0:
            return found
        ids = np.pad(found.token_ids, ((0, 0), (0, missing)))
        scores = np.pad(found.scores, ((0, 0), (0, missing)), constant_values=-np.inf)
        return BeamCandidates(ids, scores, found.sampled)
