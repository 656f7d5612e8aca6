"""Random loads of requests that share prefixes in every way there is: each gets the tokens that it would get alone."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

from harness import VOCABULARY, Harness
from quire.config.tiers import EVICTION_NAMES, TierConfig
from quire.engine.decoding.tools import DecodingTools
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.request import Abort, Branch
from toy_decoding import ToyGrammars, ToyProposers
from toy_model import continuation

SEEDS = int(os.environ.get("QUIRE_TEST_SEEDS", "1"))
ENDS = (3, 5, 7, 11, 13)


@dataclass
class Asked:
    """A request, as far as its answer depends on it."""

    prompt: list[int]
    length: int
    n: int
    seed: int
    salt: str
    end_ids: tuple[int, ...]
    is_plain: bool  # its answer is known: it is no beam search

    def answer(self, index: int) -> list[int]:
        return continuation(self.prompt, self.length, seed=self.seed, index=index, end_ids=self.end_ids)


class Load:
    """An engine with few blocks, and requests that come, branch, are aborted and end while the cache is reset."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.size = rng.choice([1, 2, 4])
        num_blocks = rng.choice([16, 24, 40]) * 4 // self.size
        self.limit = num_blocks * self.size // 2
        tiers = TierConfig(host_blocks=rng.choice([8, 30])) if rng.random() < 0.5 else TierConfig()
        proposers = ToyProposers(rng.random() < 0.5, True, rng.random() < 0.4)
        self.engine = Harness(
            num_blocks=num_blocks,
            block_size=self.size,
            depth=rng.choice([1, 2]),
            eviction=rng.choice(EVICTION_NAMES),
            tools=DecodingTools(ToyGrammars(), proposers, lambda: VOCABULARY),
            tiers=tiers,
            policy=rng.choice(["fcfs", "fcfs", "lpm", "priority", "fair"]),
            preemption=rng.choice(["auto", "recompute", "swap"]) if tiers.enabled else "recompute",
            max_num_seqs=6,
            max_num_batched_tokens=rng.choice([4, 8, 16, 32]),
            max_model_len=self.limit,
        )
        self.asked: dict[str, Asked] = {}
        self.families = [[rng.randrange(3) for _ in range(60)] for _ in range(2)]

    def draw(self, most: int) -> list[int]:
        return [self.rng.randrange(90) for _ in range(self.rng.randint(0, most))]

    def running(self) -> list[str]:
        """Requests that can be branched off."""
        return [name for name, each in self.asked.items() if each.is_plain and name not in self.engine.finished]

    def submit(self, name: str) -> None:
        rng, fields = self.rng, dict[str, object]()
        prompt, salt = [*rng.choice(self.families)[: rng.randint(0, self.limit * 2 // 3)], 1, *self.draw(3)], ""
        others = self.running()
        if others and rng.random() < 0.5:
            prompt, salt, source = self.branch(rng.choice(others))
            if rng.random() < 0.7:
                fields["source"] = source
        elif rng.random() < 0.3:
            salt = "other"
        kind = rng.random()
        if kind < 0.15:
            fields["prompt_logprobs"] = 0
        elif kind < 0.25:
            fields |= {"beam": BeamRules(2), "temperature": 0.0}
        elif kind < 0.3:
            fields["pin"] = rng.choice(["x", "y"])
        if self.engine.core.config.policy == "priority":
            fields["priority"] = rng.randint(-1, 2)
        is_plain = "beam" not in fields and "pin" not in fields
        length = max(min(rng.randint(1, 20), self.limit - len(prompt)), 1)
        n, seed, ends = rng.choice([1, 1, 2, 3]) if is_plain else 1, rng.choice([5, 105]), rng.choice([(), ENDS])
        try:
            self.engine.submit(name, prompt, n=n, seed=seed, max_tokens=length, salt=salt, end_ids=ends, **fields)  # type: ignore[arg-type]
        except InvalidRequest:
            return  # it is too long, or there is no room for another pinned prompt
        self.asked[name] = Asked(prompt, length, n, seed, salt, ends, is_plain)

    def branch(self, name: str) -> tuple[list[int], str, Branch]:
        """A prompt that goes on from anywhere in what a running request has said."""
        other = self.asked[name]
        index = self.rng.randrange(other.n)
        whole = [*other.prompt, *self.engine.streams.get(self.engine.handles[name] + index, [])]
        cut = self.rng.randint(1, len(whole))
        return [*whole[:cut], *self.draw(3)], other.salt, Branch(name, index, cut)

    def play(self, number: int) -> None:
        """One step, and perhaps something before it."""
        rng, core = self.rng, self.engine.core
        if rng.random() < 0.3:
            self.submit(f"r{number}")
        if rng.random() < 0.04 and self.asked:
            core.abort(Abort(rng.choice(list(self.asked)), rng.choice([None, 0, 1])))
        if rng.random() < 0.02:
            core.reset_cache()
        if rng.random() < 0.02:
            core.unpin("", "x")
        self.engine.step()
        assert core.dead is None

    def compare(self) -> None:
        """All answers are right; of those that were cut off, as far as they go."""
        for name, each in self.asked.items():
            message = self.engine.finished[name]
            assert message.error is None
            for sample in message.samples if each.is_plain else ():
                wanted, found = each.answer(sample.index), list(sample.token_ids)
                assert found == (wanted[: len(found)] if sample.finish_reason == "abort" else wanted)


@pytest.mark.parametrize("seed", range(12 * SEEDS))
def test_requests_that_share_prefixes_in_every_way_get_their_own_tokens(seed: int) -> None:
    load = Load(seed)
    for number in range(250):
        load.play(number)
    load.engine.run()
    assert len(load.asked) > 30
    load.compare()
