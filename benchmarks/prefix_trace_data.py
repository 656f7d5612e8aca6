"""Conversations with common prefixes: the Mooncake trace, or one made from a seed; and the upper bound of cache
hits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.policy_replay import Arrival
from quire.types.request import Submit
from quire.types.sampling import SamplingParams

HASH_TOKENS = 512  # in the trace, one hash identifies this many tokens of a prompt and all tokens before them


@dataclass(frozen=True, slots=True)
class Turn(Arrival):
    """A request whose prompt consists of named pieces of `piece` tokens; the last may be shorter."""

    hashes: tuple[int, ...] = ()
    piece: int = 1

    def submit(self, number: int) -> Submit:
        tokens = tuple(1 + name for name in self.hashes for _ in range(self.piece))[: self.prompt]
        sampling = SamplingParams(temperature=0.0, max_tokens=self.output, ignore_eos=True)
        return Submit(str(number), tokens, sampling)


def read_mooncake(path: Path, scale: int, count: int) -> list[Turn]:
    """Return the requests of a Mooncake trace (JSON lines) at their recorded times, with lengths divided by `scale`."""
    turns = []
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            if missing := {"timestamp", "input_length", "output_length", "hash_ids"} - row.keys():
                raise SystemExit(f"--trace: {path} has no {' and '.join(sorted(missing))}; give a Mooncake trace")
            turns.append(
                _turn(row["timestamp"] / 1e3, row["input_length"], row["output_length"], row["hash_ids"], scale)
            )
            if len(turns) == count:
                break
    return sorted(turns, key=lambda turn: turn.at)


def synthetic_conversations(count: int, scale: int, seed: int = 0) -> list[Turn]:
    """Return conversations of several turns, each of which begins with the whole conversation so far; all share one
    first piece."""
    rng, names, now = random.Random(seed), iter(range(1, 1 << 30)), 0.0
    open_ones: list[list[int]] = []
    turns = []
    for _ in range(count):
        now += rng.expovariate(3.0)
        if not open_ones or rng.random() < 0.5:
            open_ones.append([0])
        talk = open_ones[rng.randrange(max(len(open_ones) - 200, 0), len(open_ones))]
        talk += [next(names) for _ in range(min(1 + int(rng.expovariate(0.12)), 60))]
        turns.append(_turn(now, len(talk) * HASH_TOKENS, rng.randint(16, 600), talk, scale))
        if len(talk) > 150:
            open_ones.remove(talk)
    return turns


def _turn(at: float, num_input: int, num_output: int, hashes: Sequence[int], scale: int) -> Turn:
    piece = HASH_TOKENS // scale
    prompt = max(min(-(-num_input // scale), len(hashes) * piece), 1)
    return Turn(at, prompt, max(num_output // scale, 1), hashes=tuple(hashes), piece=piece)


def distinct_tokens(turns: Sequence[Turn]) -> int:
    """Return how many tokens a cache holds that has seen all prompts and evicts nothing."""
    return _Oracle(turns).num_tokens


def most_hits(turns: Sequence[Turn]) -> tuple[int, int]:
    """Return how many prompt tokens an infinite cache finds if each prompt is cached when the next one arrives, and how
    many are looked up. The last token of a prompt is always computed."""
    return _Oracle(turns).num_hits, sum(turn.prompt for turn in turns)


class _Oracle:
    """All prompts in order, in a tree of pieces, with the length of each piece that was seen and the pieces after
    it."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.num_hits = self.num_tokens = 0
        self._lengths: dict[tuple[int, int], int] = {}  # node before, piece -> tokens of it that were seen
        self._nodes: dict[tuple[int, int], int] = {}
        for turn in turns:
            self._add(turn)

    def _add(self, turn: Turn) -> None:
        node, found, is_known = 0, 0, True
        for place, name in enumerate(turn.hashes):
            length = min(turn.piece, turn.prompt - place * turn.piece)
            if length <= 0:
                break
            seen = self._lengths.get((node, name), 0)
            if is_known:
                found += min(seen, length)
                is_known = min(seen, length) == turn.piece
            if length > seen:
                self._lengths[node, name] = length
                self.num_tokens += length - seen
            node = self._nodes.setdefault((node, name), len(self._nodes) + 1)
        self.num_hits += min(found, turn.prompt - 1)
