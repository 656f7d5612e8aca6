"""What the model said, by request, sample and place: the same whoever asks when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.types.step import Floats, Ints

Sample = tuple[int, int]  # a request's ordinal and its sample's index


class BeamStep(NamedTuple):
    """The likeliest next tokens of a search's beams, in their order, and what each row would have chosen."""

    token_ids: Ints  # [beams, k]
    scores: Floats  # [beams, k]
    sampled: tuple[int, ...]


class Failure(NamedTuple):
    place: int  # -1: when the prompt is computed
    reason: str


@dataclass(slots=True)
class Script:
    """What a grammar said of a request's samples, by the digest of what they had generated."""

    over: set[str] = field(default_factory=set)
    forced: dict[str, tuple[int, ...]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    refused: set[tuple[str, int]] = field(default_factory=set)  # with the token


@dataclass(slots=True)
class Answers:
    """All that is known. Beyond it a sample goes on with a token that does not end it."""

    tokens: defaultdict[Sample, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[tuple[int, int, int], float] = field(default_factory=dict)
    beams: dict[tuple[int, int], BeamStep] = field(default_factory=dict)  # by ordinal and place
    drafts: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    failures: dict[Sample, Failure] = field(default_factory=dict)
    scripts: defaultdict[int, Script] = field(default_factory=lambda: defaultdict(Script))
    fillers: dict[int, int] = field(default_factory=dict)  # by ordinal, where 0 ends a sample

    def add_tokens(self, sample: Sample, place: int, ids: list[int]) -> None:
        """What a sample said from a place on; what was said of these places before is void."""
        said = self.tokens[sample]
        said += [self.filler(sample[0])] * (place - len(said))
        said[place : place + len(ids)] = ids

    def token(self, ordinal: int, index: int, place: int) -> int:
        said = self.tokens.get((ordinal, index), ())
        return said[place] if place < len(said) else self.filler(ordinal)

    def filler(self, ordinal: int) -> int:
        return self.fillers.get(ordinal, 0)

    def note_ends(self, ordinal: int, end_ids: tuple[int, ...]) -> None:
        if 0 in end_ids:
            self.fillers[ordinal] = next(token for token in range(len(end_ids) + 1) if token not in end_ids)

    def beam_step(self, ordinal: int, place: int, num_beams: int, width: int) -> BeamStep:
        """`width` candidates for each of so many beams."""
        step = self.beams.get((ordinal, place))
        if step is None or len(step.token_ids) < num_beams:
            first = self.filler(ordinal)
            ids = np.arange(first + 1, first + 1 + width, dtype=np.int32)
            scores = -np.arange(1, width + 1, dtype=np.float32)
            return BeamStep(np.tile(ids, (num_beams, 1)), np.tile(scores, (num_beams, 1)), (first,) * num_beams)
        missing = width - step.token_ids.shape[1]
        if missing <= 0:
            return step
        ids = np.pad(step.token_ids, ((0, 0), (0, missing)))
        return BeamStep(ids, np.pad(step.scores, ((0, 0), (0, missing)), constant_values=-np.inf), step.sampled)
