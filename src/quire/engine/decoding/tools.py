"""What the engine is given to decode with besides an executor."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.decoding.grammar import Grammars, NoGrammars
from quire.engine.decoding.lookahead import Lookaheads, NoLookaheads
from quire.engine.decoding.vocabulary import VocabularySource


@dataclass(frozen=True, slots=True)
class DecodingTools:
    """By default nothing is guessed, and an engine that has no vocabulary refuses what depends on text."""

    grammars: Grammars = field(default_factory=NoGrammars)
    lookaheads: Lookaheads = field(default_factory=NoLookaheads)
    vocabulary: VocabularySource | None = None
