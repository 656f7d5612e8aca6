"""The optional parts of an engine for decoding: grammars, draft proposers, the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.decoding.grammar import Grammars, NoGrammars
from quire.engine.decoding.vocabulary import VocabularySource
from quire.engine.speculation.proposer import DraftProposers, NoProposers


@dataclass(frozen=True, slots=True)
class DecodingTools:
    """By default there are no drafts. Without a vocabulary, the engine refuses grammars and stop strings of ranked
    samples."""

    grammars: Grammars = field(default_factory=NoGrammars)
    proposers: DraftProposers = field(default_factory=NoProposers)
    vocabulary: VocabularySource | None = None
