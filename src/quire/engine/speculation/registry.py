"""Which DraftProposers go with which speculation settings."""

from __future__ import annotations

from quire.config.speculation import SpeculationConfig
from quire.engine.speculation.ngram import NgramProposers
from quire.engine.speculation.proposer import DraftProposers, NoProposers
from quire.engine.speculation.runtime_drafts import RuntimeDraftProposers


def make_proposers(config: SpeculationConfig | None, depth: int) -> DraftProposers:
    """For an executor that keeps `depth` steps in flight."""
    if config is None:
        return NoProposers()
    return NgramProposers(config, depth) if config.method == "ngram" else RuntimeDraftProposers(config, depth)
