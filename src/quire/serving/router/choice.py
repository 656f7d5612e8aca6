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
    """The chosen replica, the reason, and how many leading bytes of the prompt its cache is expected to hold."""

    replica: Replica
    reason: Reason
    matched: int = 0


class Chooser:
    """Chooses by the longest expected cache hit, else by session, else by load.

    A replica whose load reaches `load_factor` times the mean plus `load_slack` is overloaded and is not chosen while
    another one is below that bound. By load: the less loaded of two random replicas (power of two choices).
    """

    def __init__(self, config: BalanceConfig, rng: random.Random | None = None) -> None:
        self._config = config
        self._rng = rng or random.Random()

    def choose(self, candidates: Sequence[Replica], prompt: Prompt) -> Choice:
        """Choose one of `candidates` (at least one) and insert the prompt's chunks into its prefix tree."""
        keys = prompt.keys
        if len(candidates) == 1:
            return Choice(candidates[0], _reason(prompt), CHUNK_ENDS[candidates[0].tree.insert(keys)])
        matches = [replica.tree.match(keys) for replica in candidates]
        place, reason = self._choose(candidates, prompt, matches)
        candidates[place].tree.insert(keys, matches[place])
        return Choice(candidates[place], reason, CHUNK_ENDS[matches[place]])

    def _choose(self, candidates: Sequence[Replica], prompt: Prompt, matches: Sequence[int]) -> tuple[int, Reason]:
        """Return the index of the chosen candidate and the reason. `matches[i]`: leading chunks of the prompt that
        candidate i holds. Only candidates below the load bound are considered; if there is none, the least loaded
        one."""
        loads = [replica.load for replica in candidates]
        bound = self._config.load_factor * sum(loads) / len(loads) + self._config.load_slack
        places: Sequence[int] = range(len(loads))
        if max(loads) >= bound:
            places = [place for place in places if loads[place] < bound] or [loads.index(min(loads))]
        most, reason = max(matches), _reason(prompt)
        gain = CHUNK_ENDS[most] - CHUNK_ENDS[min(matches)]
        if gain > 0 and gain >= self._config.least_gain * prompt.num_bytes:
            longest = [place for place in places if matches[place] == most]
            if longest:
                places, reason = longest, "prefix"
        if len(places) == 1:
            return places[0], reason
        if prompt.session:
            return max(places, key=lambda place: rendezvous_weight(prompt.session, candidates[place].name)), reason
        first, second = self._two_of(places)
        return first if loads[first] <= loads[second] else second, reason

    def _two_of(self, places: Sequence[int]) -> tuple[int, int]:
        """Return two different random items of at least two. `random.sample` takes three times as long."""
        count, random_part = len(places), self._rng.random
        first, second = int(random_part() * count), int(random_part() * (count - 1))
        return places[first], places[second + (second >= first)]


def _reason(prompt: Prompt) -> Reason:
    """The reason for a choice that was not made by the longest match."""
    return "session" if prompt.session else "load"


def rendezvous_weight(session: str, name: str) -> bytes:
    """Return the rendezvous-hashing weight of a replica for a session. The replica with the highest weight gets the
    session, so removing a replica moves only that replica's sessions."""
    text = f"{session}\0{name}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_WEIGHT_BYTES).digest()
