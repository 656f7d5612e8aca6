"""Random mixes of every way to decode, in one engine: each answer is the one that its request gets alone, every owner
agrees after every step, and nothing is left behind. QUIRE_TEST_SEEDS sets how many mixes are tried (`make soak`)."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import pytest

from fake_tiers import FakeTiers, Memory, random_faults
from harness import VOCABULARY, Harness
from quire.config.policy import POLICY_NAMES, RESERVING
from quire.config.tiers import TierConfig
from quire.engine.decoding.tools import DecodingTools
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.output import Finished
from quire.types.request import Abort, Branch
from toy_decoding import BeamQuestion, ToyGrammars, ToyProposers, beam_answers, grammar_answer, letter
from toy_model import VOCAB, continuation, logprob

SEEDS = int(os.environ.get("QUIRE_TEST_SEEDS", "300"))
SHARDS = 20
END_IDS = (3, 50)
STEM = list(range(7, 22))
TALE = [(11 * place) % VOCAB for place in range(300)]
Files = Mapping[bytes, Memory]


@dataclass
class Asked:
    """One request of a mix, and what must come of it."""

    prompt: list[int]
    seed: int
    length: int
    params: dict[str, object] = field(default_factory=dict)
    tokens: Callable[[int], list[int]] = lambda index: []
    ranked: list[tuple[int, ...]] | None = None  # the samples' tokens, best first


def ask(rng: random.Random, number: int, num_slots: int, *, is_crowd: bool) -> Asked:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))]
    seed = rng.choice([number % 100, 100 + number])  # from 100 on there are guesses
    asked = Asked(prompt, seed, rng.randint(1, 14))
    kind = rng.random()
    if is_crowd:  # of those that grow and make room for each other
        asked.prompt, asked.length = rng.choice([prompt[:1], prompt]), rng.randint(6, 16)
        _plain(rng, asked)
        return asked
    if kind < 0.12:  # one that takes the cache alone, or nearly so, and begins like others of its kind
        length = max(num_slots - rng.choice([0, 1, 2, 9, num_slots // 2]), 2)
        asked.prompt, asked.length = [*TALE[: length - rng.choice([1, 2, 5])], *prompt][:length], rng.choice([1, 1, 4])
        _plain(rng, asked)
        return asked
    if kind < 0.4:
        asked.prompt = STEM[: rng.randint(1, len(STEM))] + prompt[:3]  # some begin alike
    elif kind < 0.5:
        asked.prompt = prompt[:1]
    rng.choice([_plain, _plain, _constrained, _best_of, _beams])(rng, asked)
    return asked


def _plain(rng: random.Random, asked: Asked) -> None:
    asked.params = {"n": rng.randint(1, 3), "logprobs": rng.choice([None, 0])}
    asked.tokens = lambda index: continuation(asked.prompt, asked.length, seed=asked.seed, index=index, end_ids=END_IDS)


def _constrained(rng: random.Random, asked: Asked) -> None:
    grammar = rng.choice("abcdefg") * rng.randint(1, 4)
    asked.params = {"n": rng.randint(1, 3), "grammar": grammar}
    asked.tokens = lambda index: grammar_answer(
        asked.prompt, asked.length, grammar, seed=asked.seed, index=index, end_ids=END_IDS
    )


def _best_of(rng: random.Random, asked: Asked) -> None:
    count, n, rank_by, stop = rng.randint(2, 4), 1, rng.choice(["mean", "sum"]), rng.choice(["", "", "e"])
    n = rng.randint(1, count - 1)
    asked.params = {"n": n, "best_of": count, "rank_by": rank_by, "stop": stop or None}
    found = []
    for index in range(count):
        tokens = continuation(asked.prompt, asked.length, seed=asked.seed, index=index, end_ids=END_IDS)
        if stop:
            ends = [place for place, token in enumerate(tokens, 1) if letter(token) == stop and token not in END_IDS]
            tokens = tokens[: ends[0]] if ends else tokens
        history = [*asked.prompt, *tokens]
        first = len(asked.prompt)
        total = sum(logprob(history[: first + place], token) for place, token in enumerate(tokens))
        found.append((total / len(tokens) if rank_by == "mean" else total, tuple(tokens)))
    asked.ranked = [tokens for _, tokens in sorted(found, key=lambda one: -one[0])][:n]


def _beams(rng: random.Random, asked: Asked) -> None:
    rules = BeamRules(
        rng.randint(1, 5),
        rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
        rng.choice([True, False, "never"]),
        rng.random() < 0.3,
    )
    grammar, stop = rng.choice(["", "", "h", "ii"]), rng.choice(["", "", "ab", "q"])
    n = rng.randint(1, rules.width)
    asked.params = {"n": n, "beam": rules, "grammar": grammar, "stop": stop or None}
    question = BeamQuestion(tuple(asked.prompt), rules, asked.length, END_IDS, grammar, stop)
    asked.ranked = [answer.tokens for answer in beam_answers(question)][:n]


def tiers_of(seed: int, block_size: int, policy: str, files: Files) -> tuple[TierConfig, FakeTiers, str]:
    """Where blocks go, what lies there, and what becomes of a request that must make room; half of all have none."""
    rng = random.Random(seed + 1)
    if policy in RESERVING or rng.random() < 0.5:
        return TierConfig(), FakeTiers(0, block_size), rng.choice(["auto", "recompute"])
    config = TierConfig(rng.choice([3, 20, 100]), *rng.choice([("", 0), ("folder", 9), ("folder", 300)]))
    config = replace(config, write=rng.choice(["back", "through"]))
    faults = random_faults(seed, rng.choice([0.0, 0.2, 0.9]))
    speeds = rng.choice([1e-9, 1e-3]), rng.choice([1e-9, 1e-3])
    behind = FakeTiers(config.host_blocks, block_size, rng.choice([1, 3, 50]), *speeds, faults, dict(files))
    return config, behind, rng.choice(["auto", "swap", "swap", "recompute"])


class Mix:
    """An engine of random size, and requests that arrive, branch and are cut off at random."""

    def __init__(self, seed: int, files: Files = MappingProxyType({})) -> None:
        self.rng = rng = random.Random(seed)
        block_size = self.block_size = rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8])
        self.grammars = ToyGrammars()
        policy = random.Random(seed).choice(["fcfs"] * 5 + list(POLICY_NAMES))
        tiers, behind, preemption = tiers_of(seed, block_size, policy, files)
        lookaheads = ToyProposers(rng.random() < 0.5, rng.random() < 0.7)
        self.is_crowd = preemption == "swap" and rng.random() < 0.5
        num_tokens = rng.choice([45, 60, 80, 150, 300])
        if tiers.enabled:  # few: blocks must move
            num_tokens = rng.choice([20, 25, 30] if self.is_crowd else [30, 45])
        num_blocks = num_tokens // block_size
        self.num_slots = num_blocks * block_size
        self.engine = Harness(
            num_blocks=num_blocks,
            block_size=block_size,
            depth=rng.randint(1, 3),
            caching=rng.random() < 0.7 and policy not in RESERVING,
            tools=DecodingTools(self.grammars, lookaheads, lambda: VOCABULARY),
            max_num_batched_tokens=rng.choice([6, 17, 64]),
            max_num_seqs=rng.choice([6, 9, 16]),
            policy=policy,
            tiers=tiers,
            behind=behind,
            preemption=preemption,
        )
        self.asked: dict[str, Asked] = {}
        self.cut: set[str] = set()
        self.num_refused = self.num_branches = self.num_pinned = 0
        hurry, most = rng.choice([(10, 12), (60, 12), (60, 40)])
        self.arrivals = sorted(rng.randrange(hurry) for _ in range(rng.randint(4, most)))

    def run(self) -> None:
        """Serve all that arrives, to its end, and compare every answer."""
        self.num_arrivals = len(self.arrivals)
        step = 0
        while self.arrivals or self.engine.core.has_work:
            while self.arrivals and self.arrivals[0] <= step:
                self.arrivals.pop(0)
                self._submit()
            self._meddle()
            self.grammars.time += 1
            self.engine.step()
            step += 1
            assert step < 3_000
        assert set(self.engine.finished) == set(self.asked)
        assert len(self.asked) + self.num_refused == self.num_arrivals
        self.engine.core.pins.reset()
        assert self.engine.core.stats().blocks.used == 0
        assert self.engine.core.stats().tiers.host_held <= self.engine.tiers.num_queued
        for name, asked in self.asked.items():
            self._check(name, asked, self.engine.finished[name])

    def _meddle(self) -> None:
        """Requests are cut off, some while they wait; prompts become resident, or are let go of; all is forgotten."""
        chance, core = self.rng.random(), self.engine.core
        if chance < 0.03 and self.asked:
            self._abort(self.rng.choice(list(self.asked)))
        elif chance < (0.13 if self.is_crowd else 0.06):
            waiting = [group.request.request_id for group in core._scheduler.waiting if group.num_preemptions]
            if waiting:
                self._abort(waiting[0], index=0)
        elif 0.13 <= chance < 0.15 and core._cache.enable_prefix_caching:
            self.num_arrivals += 1
            self._submit(pin=self.rng.choice("ab"))
        elif 0.15 <= chance < 0.17:
            core.unpin("", self.rng.choice("ab"))
        elif 0.17 <= chance < 0.18:
            core.reset_cache()

    def _submit(self, pin: str = "") -> None:
        number = len(self.asked)
        name, asked, source = f"r{number}", ask(self.rng, number, self.num_slots, is_crowd=self.is_crowd), None
        if pin:
            asked = Asked(STEM[: self.rng.randint(1, len(STEM))], number, 1)
            asked.prompt += asked.prompt[-1:] * (-len(asked.prompt) % self.block_size)  # as the engine fills it up
            _plain(self.rng, asked)
        elif self.asked and self.rng.random() < 0.25:
            asked, source = self._branch(asked)
        try:
            self.engine.submit(
                name, asked.prompt, max_tokens=asked.length, seed=asked.seed, end_ids=END_IDS, source=source,
                pin=pin, **asked.params,
            )  # fmt: skip
        except InvalidRequest as refusal:
            if refusal.field not in ("beam_width", "best_of", "n", "max_tokens", "prompt" if pin else ""):
                raise
            self.num_refused += 1
        else:
            self.asked[name] = asked
            self.num_branches += source is not None
            self.num_pinned += bool(pin)

    def _branch(self, asked: Asked) -> tuple[Asked, Branch | None]:
        """The same kind of request from some place in what another one has said so far."""
        name = self.rng.choice(list(self.asked))
        other = self.asked[name]
        said = self.engine.streams.get(self.engine.handles[name], [])
        if other.ranked is not None or not said:
            return asked, None
        whole = other.prompt + said
        asked = Asked([*whole[: self.rng.randint(1, len(whole))], *asked.prompt[:2]], asked.seed, asked.length)
        _plain(self.rng, asked)
        return asked, Branch(name, 0, len(asked.prompt) - 2 if len(asked.prompt) > 2 else 1)

    def _abort(self, name: str, index: int | None = None) -> None:
        index = self.rng.choice([None, None, 0, index]) if self.asked[name].ranked is None else None
        if name not in self.engine.finished:
            self.cut.add(name)
        self.engine.core.abort(Abort(name, index, self.rng.choice([None, "text"])))

    def _check(self, name: str, asked: Asked, message: Finished) -> None:
        assert message.error is None
        samples = message.samples
        assert [sample.index for sample in samples] == list(range(len(samples)))
        if asked.ranked is not None:
            if name not in self.cut:
                assert [sample.token_ids for sample in samples] == asked.ranked
                assert all(sample.score is not None and sample.cumulative_logprob is not None for sample in samples)
            return
        assert len(samples) == asked.params["n"]
        for sample in samples:
            wanted = asked.tokens(sample.index)
            if name in self.cut:
                wanted = wanted[: len(sample.token_ids)]
            assert list(sample.token_ids) == wanted
            assert self.engine.streams.get(self.engine.handles[name] + sample.index, []) == wanted
            assert len(sample.logprobs) in (0, len(wanted))
            assert [int(entry.token_ids[0]) for entry in sample.logprobs] in ([], wanted)

    def exercised(self) -> Counter[str]:
        """How often a run met what it is there to meet."""
        stats = self.engine.core.stats()
        whole = [asked for name, asked in self.asked.items() if name not in self.cut]
        met = {
            "answers compared": len(whole),
            "plain": sum(asked.ranked is None and "grammar" not in asked.params for asked in whole),
            "grammars": sum(bool(asked.params.get("grammar")) for asked in whole),
            "best_of": sum("best_of" in asked.params for asked in whole),
            "beams": sum("beam" in asked.params for asked in whole),
            "branches": self.num_branches,
            "cut off": len(self.cut),
            "pinned": self.num_pinned,
            "drafts": stats.drafts,
            "cached": stats.prefix_hits,
            "recomputed": stats.preemptions - stats.swaps,
            "swapped": stats.swaps,
            "from host memory": stats.host_hits,
            "from disk": stats.disk_hits,
            "failures": sum(stats.tiers.failures.values()),
        }
        return Counter(met)


def play(seed: int) -> Counter[str]:
    """Run a mix; and if it leaves files, once more, after a restart."""
    try:
        mix = Mix(seed)
        mix.run()
        met = mix.exercised()
        if mix.engine.tiers.files:
            again = Mix(seed, mix.engine.tiers.files)
            again.run()
            met.update(again.exercised())
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    return met


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_answer_of_a_random_mix_is_the_one_its_request_gets_alone(shard: int) -> None:
    seeds = range(shard, SEEDS, SHARDS)
    met = sum(map(play, seeds), Counter())
    assert met["answers compared"] >= len(seeds) // 2  # some mixes have a cache that nothing of theirs fits into


def test_random_mixes_meet_every_way_to_decode_and_to_make_room() -> None:
    met: Counter[str] = Counter()
    for seed in range(60):
        met.update(play(seed))
    assert min(met.values()) > 0, met
