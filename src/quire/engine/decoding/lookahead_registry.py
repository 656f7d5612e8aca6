"""Which way of guessing goes with which configuration."""

from __future__ import annotations

from quire.config.speculation import SpeculationConfig
from quire.engine.decoding.lookahead import Lookaheads, NoLookaheads
from quire.engine.decoding.lookahead_ngram import NgramLookaheads
from quire.engine.decoding.lookahead_ordered import OrderedLookaheads


def make_lookaheads(config: SpeculationConfig | None, depth: int) -> Lookaheads:
    """For an executor that keeps `depth` steps in flight: with more than one, a sequence that waits loses time."""
    if config is None:
        return NoLookaheads()
    make = NgramLookaheads if config.method == "ngram" else OrderedLookaheads
    return make(config, runs_ahead=depth > 1)
