"""The optional parts of an engine for decoding: grammars, draft proposers and the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.decoding.grammar import Compilation, Grammars, NoGrammars
from quire.engine.decoding.vocabulary import VocabularySource
from quire.engine.speculation.proposer import DraftProposers, NoProposers
from quire.types.errors import InvalidRequest
from quire.types.grammar import grammar_digest
from quire.types.sampling import TokenRules


@dataclass(frozen=True, slots=True)
class DecodingTools:
    """The optional parts for decoding. By default there are no drafts. Without a vocabulary, the engine refuses
    grammars and stop strings of ranked samples. With `checked_only`, it refuses a grammar without the digest of its
    check."""

    grammars: Grammars = field(default_factory=NoGrammars)
    proposers: DraftProposers = field(default_factory=NoProposers)
    vocabulary: VocabularySource | None = None
    checked_only: bool = False

    def compile(self, rules: TokenRules) -> Compilation:
        """Start to compile the grammar of a request. Raises InvalidRequest for a grammar that is not allowed.

        A grammar that was not checked could take unlimited time and memory.
        """
        if self.checked_only and rules.grammar_digest != grammar_digest(rules.grammar):
            reason = "carries a grammar that was not checked"
            raise InvalidRequest("structured_outputs", reason, "submit the grammar that the checker returned")
        return self.grammars.compile(rules.grammar)
