"""What the engine is given to decode with besides an executor."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.decoding.grammar import Grammars, NoGrammars
from quire.engine.decoding.vocabulary import VocabularySource
from quire.engine.speculation.proposer import DraftProposers, NoProposers


@dataclass(frozen=True, slots=True)
class DecodingTools:
    """By default nothing is guessed, and an engine that has no vocabulary refuses what depends on text."""

    grammars: Grammars = field(default_factory=NoGrammars)
    proposers: DraftProposers = field(default_factory=NoProposers)
    vocabulary: VocabularySource | None = None
