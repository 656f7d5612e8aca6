"""Chooses the replica of a request: the longest cached prefix, under a bound on load."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.config.router import BalanceConfig
from quire.serving.router.prompt_keys import CHUNK_ENDS, Prompt
from quire.serving.router.replica import Replica

Reason = Literal["prefix", "session", "load", "home", "asked"]
_WEIGHT_BYTES = 8


@dataclass(slots=True)
class Choice:
    """A replica, why it was chosen, and how many leading bytes of the prompt it is expected to have cached."""

    replica: Replica
    reason: Reason
    matched: int = 0


class Chooser:
    """Decides by expected cache hits where there are some, else by session, else by load.

    A replica whose load is above `load_factor` times the mean plus `load_slack` is overloaded: then the session or the
    load decides. By load: of two random replicas the one with less (power of two choices).
    """

    def __init__(self, config: BalanceConfig, rng: random.Random | None = None) -> None:
        self._config = config
        self._rng = rng or random.Random()

    def choose(self, candidates: Sequence[Replica], prompt: Prompt) -> Choice:
        """Choose one of `candidates`, which are not empty, and note the prompt in its tree."""
        keys = prompt.keys
        held = [replica.tree.match(keys) for replica in candidates]
        place, reason = self._choose(candidates, prompt, [CHUNK_ENDS[count] for count in held])
        replica = candidates[place]
        replica.tree.insert(keys, held[place])
        return Choice(replica, reason, CHUNK_ENDS[held[place]])

    def _choose(
        self, candidates: Sequence[Replica], prompt: Prompt, matches: Sequence[int]
    ) -> tuple[int, Literal["prefix", "session", "load"]]:
        """The place of a replica, and why it is chosen. `matches`: the bytes that each has."""
        free = self._within_bound(candidates)
        best, least = max(matches), min(matches)
        if best > least and best - least >= self._config.least_gain * prompt.num_bytes:
            longest = [place for place in free if matches[place] == best]
            if longest:
                return self._among(candidates, longest, prompt.session), "prefix"
        return self._among(candidates, free, prompt.session), "session" if prompt.session else "load"

    def _within_bound(self, candidates: Sequence[Replica]) -> list[int]:
        """The places of the replicas that are not overloaded. There is always one: the least loaded."""
        loads = [replica.load for replica in candidates]
        bound = self._config.load_factor * sum(loads) / len(loads) + self._config.load_slack
        return [place for place, load in enumerate(loads) if load < bound] or [loads.index(min(loads))]

    def _among(self, candidates: Sequence[Replica], places: Sequence[int], session: str) -> int:
        if len(places) == 1:
            return places[0]
        if session:
            return max(places, key=lambda place: rendezvous_weight(session, candidates[place].name))
        first, second = self._rng.sample(places, 2)
        return first if candidates[first].load <= candidates[second].load else second


def rendezvous_weight(session: str, name: str) -> bytes:
    """The weight of a replica for a session. The heaviest gets it; when that one goes, no other session moves."""
    text = f"{session}\0{name}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_WEIGHT_BYTES).digest()
