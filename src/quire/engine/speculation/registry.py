"""Draft proposers by the name of the speculation method."""

from __future__ import annotations

from quire.config.speculation import SpeculationConfig
from quire.engine.speculation.ngram import NgramProposers
from quire.engine.speculation.proposer import DraftProposers, NoProposers
from quire.engine.speculation.runtime_drafts import RuntimeDraftProposers


def make_proposers(config: SpeculationConfig | None, depth: int) -> DraftProposers:
    """Make the DraftProposers that the configuration names, for an engine with `depth` steps in flight."""
    if config is None:
        return NoProposers()
    return NgramProposers(config, depth) if config.method == "ngram" else RuntimeDraftProposers(config, depth)
