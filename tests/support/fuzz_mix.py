"""One random mix of the engine's fuzz: an engine, the requests that it serves, and what happens to them meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from fake_tiers import FakeTiers, Memory, random_faults
from fuzz_faults import Faults, FaultyProposers
from fuzz_grammars import REAL_GRAMMARS, FuzzGrammars
from fuzz_requests import END_IDS, FAILING_GRAMMARS, STEM, Asked, Crowd, ask, constrain, echo, plain
from harness import Harness
from quire.config.kv_cache import PLAIN, KVGroups
from quire.config.policy import POLICY_NAMES, RESERVING
from quire.config.speculation import SpeculationConfig
from quire.config.tiers import EVICTION_NAMES, TierConfig
from quire.engine.decoding.tools import DecodingTools
from quire.engine.scheduler.adapter_slots import NO_SLOT
from quire.engine.speculation.ngram import NgramProposers
from quire.engine.speculation.proposer import DraftProposers
from quire.engine.speculation.runtime_drafts import RuntimeDraftProposers
from quire.types.errors import InvalidRequest
from quire.types.output import Finished
from quire.types.request import Abort, Branch
from toy_decoding import ToyProposers
from toy_model import VOCAB

Files = Mapping[bytes, Memory]
NAMES = "abc"  # of pinned prompts
ADAPTERS = "xyz"
MEETS = (
    *POLICY_NAMES, *EVICTION_NAMES,
    "answers compared", "plain", "toy grammars", "real grammars", "masks alone", "masks in a batch", "best_of", "beams",
    "branches", "failed", "refused", "cut off", "cut off while compiling", "closed while compiling", "drafts",
    "looked up drafts", "ordered drafts", "cached", "salts of their own", "old blocks", "evicted", "cache reset",
    "pinned", "unpinned", "recomputed", "swapped", "from host memory", "from disk", "files lost",
    "adapters", "waits for a slot",
)  # fmt: skip
LONGEST = 100  # tokens of a sequence, where a policy reserves memory for so many
REFUSALS = ("beam_width", "best_of", "n", "max_tokens", "priority", "structured_outputs", "request")


@dataclass
class Clock:
    """Seconds that pass whenever somebody looks: as many in every run of a seed."""

    rng: random.Random
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.rng.random() * 1e-3
        return self.now


def tiers_of(seed: int, block_size: int, policy: str, files: Files) -> tuple[TierConfig, FakeTiers, str]:
    """The tiers, what is in them, and what becomes of a request that is preempted; half of all mixes have none."""
    rng = random.Random(seed + 1)
    if policy in RESERVING or rng.random() < 0.5:
        return TierConfig(), FakeTiers(0, block_size), rng.choice(["auto", "recompute"])
    config = TierConfig(rng.choice([3, 20, 100]), *rng.choice([("", 0), ("folder", 9), ("folder", 300)]))
    config = replace(config, write=rng.choice(["back", "through"]))
    faults = random_faults(seed, rng.choice([0.0, 0.2, 0.9]))
    speeds = rng.choice([1e-9, 1e-3]), rng.choice([1e-9, 1e-3])
    behind = FakeTiers(config.host_blocks, block_size, rng.choice([1, 3, 50]), *speeds, faults, dict(files))
    return config, behind, rng.choice(["auto", "swap", "swap", "recompute"])


def proposers_of(rng: random.Random, depth: int, period: int) -> DraftProposers:
    """The n-gram lookup where the pretend model repeats itself; else drafts by the executor, or toys that know most of
    the answer. All of them are wrong now and then."""
    if period:
        return NgramProposers(SpeculationConfig(method="ngram", num_tokens=rng.choice([2, 16])), depth)
    if rng.random() < 0.1:
        return RuntimeDraftProposers(SpeculationConfig(method="draft_model", num_tokens=rng.choice([1, 5])), depth)
    orders, observes = rng.random() < 0.4, rng.random() < 0.4
    return ToyProposers(orders, rng.random() < 0.7, observes, rng.choice([5, 40]), rng.random() < 0.1)


def groups_of(seed: int, num_rows: int) -> KVGroups:
    """Windows of some layers or all, states, or both."""
    rng = random.Random(seed + 4)
    kind = rng.random()
    windows = (rng.choice([1, 2, 5, 12, 40]), rng.choice([1, 1, 2, 5])) if kind < 0.7 else (None, 0)
    if windows[0] is not None and random.Random(seed + 6).random() < 0.4:
        windows = windows[0], 0  # all layers have a window
    states = (num_rows + rng.choice([1, 3, 30]), rng.choice([1, 3])) if kind > 0.4 else (0, 0)
    return KVGroups(*windows, *states)


class Mix:
    """An engine of random size and settings, and requests that arrive, branch, are cut off and fail at random."""

    def __init__(
        self,
        seed: int,
        files: Files = MappingProxyType({}),
        salts: frozenset[str] = frozenset(),
        *,
        is_grouped: bool = False,
        micro_batches: int = 1,
    ) -> None:
        """`files` are what an earlier engine left on disk, for requests of these `salts`. `is_grouped`: the model has
        layers with a window, or recurrent ones, or both."""
        self.rng, self.adapters = random.Random(seed), random.Random(seed + 5)
        rng = self.rng
        self.block_size = block_size = rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8])
        policy = rng.choice(["fcfs"] * 4 + ["priority", "fair"] + list(POLICY_NAMES))
        tiers, behind, preemption = tiers_of(seed, block_size, policy, files)
        kind, depth = rng.random(), rng.randint(1, 3)
        is_guided, period = kind < 0.15, rng.choice([2, 3, 5]) if 0.15 <= kind < 0.25 else 0
        grows = not period and preemption == "swap" and rng.random() < 0.5
        num_tokens = rng.choice([45, 60, 80, 150, 300])
        if tiers.enabled:  # few: blocks must move
            num_tokens = rng.choice([20, 25, 30] if grows else [30, 45])
        if is_guided or policy in RESERVING:
            num_tokens *= 4
        num_blocks = num_tokens // block_size
        longest = LONGEST - 10 if policy in RESERVING else num_blocks * block_size
        max_num_seqs, groups = rng.choice([16, 24] if is_guided else [6, 9, 16]), PLAIN
        if is_grouped and policy not in RESERVING:
            groups = groups_of(seed, max_num_seqs)
            num_blocks *= 1 + groups.num_window_blocks
            if groups.all_windows:  # sequences are longer than memory
                num_blocks = max(num_blocks // random.Random(seed + 7).choice([1, 2, 3, 5]), 4)
            tiers = replace(tiers, host_blocks=tiers.host_blocks * 3)
            behind.__init__(tiers.host_blocks, *list(vars(behind).values())[1:7])  # type: ignore[misc]
        self.crowd = Crowd(longest, grows, is_guided, policy in RESERVING, period)
        self.grammars, self.proposers = FuzzGrammars(), proposers_of(rng, depth, period)
        self.faults = Faults(random.Random(seed + 2), rng.choice([0.0, 0.05, 0.3]))
        self.engine = Harness(
            num_blocks=num_blocks,
            block_size=block_size,
            depth=depth * micro_batches,
            micro_batches=micro_batches,
            caching=rng.random() < 0.7 and policy not in RESERVING,
            eviction=rng.choice(EVICTION_NAMES),
            tools=DecodingTools(self.grammars, FaultyProposers(self.proposers, self.faults), self.faults.vocabulary),
            clock=Clock(random.Random(seed + 3)),
            max_num_batched_tokens=rng.choice([6, 17, 64]),
            max_num_seqs=max_num_seqs,
            max_model_len=LONGEST if policy in RESERVING else 512,
            policy=policy,
            tiers=tiers,
            behind=behind,
            preemption=preemption,
            groups=groups,
            adapters={name: f"digest {name}" for name in ADAPTERS},
            adapter_slots=self.adapters.choice([0, 1, 2]),
        )
        for name in ADAPTERS if self.engine.core.config.adapter_slots else ():
            self.engine.core.adapters.load(name, name)
        self.engine.executor.period = period
        self.least_batch = rng.choice([0, 4])  # masks of more rows than this are made together
        self.asked: dict[str, Asked] = {}
        self.cut: set[str] = set()
        self.met: Counter[str] = Counter()
        self.old_salts = salts
        hurry, most = (10, 40) if is_guided else rng.choice([(10, 12), (60, 12), (60, 40)])
        self.arrivals = sorted(rng.randrange(hurry) for _ in range(rng.randint(4, most)))
        self.closes_from = rng.randrange(15) if rng.random() < 0.08 else 3_000

    # ---------------------------------------------------------------------------------------------------- the run
    def run(self) -> None:
        """Serve all that arrives, to its end, and compare every answer. A few engines are closed before the end."""
        if self.rng.random() < 0.3:
            self._fill_cache()
        step = 0
        while self.arrivals or self.engine.core.has_work:
            while self.arrivals and self.arrivals[0] <= step:
                self.arrivals.pop(0)
                self._submit(self._next())
            self._meddle()
            self._step()
            step += 1
            assert step < 3_000
            if step >= self.closes_from and (self.engine.core._compiling or self.rng.random() < 0.05):
                break
        else:
            self._check_idle()
        self._close()
        for name, message in self.engine.finished.items():
            self._check(name, self.asked[name], message)
        self._check_salts()

    def _step(self) -> None:
        self.faults.plant(self.engine.core, self.engine.executor, list(self.asked))
        self.grammars.time += 1
        self.engine.step()
        assert self.engine.core.dead is None, self.engine.core.dead

    def _fill_cache(self) -> None:
        """Leave old blocks everywhere."""
        for _ in range(6):
            count = max(self.crowd.num_slots // 3, self.crowd.period + 1)
            asked = Asked([self.rng.randrange(VOCAB) for _ in range(count)], len(self.asked), 2)
            self._answer_plainly(asked)
            self._submit(asked)
            while self.engine.core.has_work:
                self._step()
        self.met["old blocks"] += bool(self.engine.core.block_map().cached)

    def _meddle(self) -> None:
        """Requests are cut off, some while they wait or while their grammar is compiled; prompts are pinned and
        unpinned; the cache is reset."""
        chance, core = self.rng.random(), self.engine.core
        if chance < 0.03 and self.asked:
            self._abort(self.rng.choice(list(self.asked)))
        elif chance < (0.13 if self.crowd.grows else 0.06):
            waiting = [group.request.request_id for group in core._scheduler.waiting if group.num_preemptions]
            if waiting:
                self._abort(waiting[0], index=0)
        elif 0.13 <= chance < 0.16 and core._cache.enable_prefix_caching:
            self._submit(self._pinned(), pin=self.rng.choice(NAMES))
        elif 0.16 <= chance < 0.18:
            self.met["unpinned"] += core.unpin(self.rng.choice(["", "s"]), self.rng.choice(NAMES))
        elif 0.18 <= chance < 0.19:
            self.met["cache reset"] += 1
            core.reset_cache()
        elif 0.19 <= chance < 0.2:  # looking on changes nothing
            core.slack_seconds()
            core.block_map()
            core.stats()
        elif chance < 0.25 and core._compiling:
            name = self.rng.choice([group.request.request_id for group in core._compiling])
            self.met["cut off while compiling"] += 1
            self._abort(name, index=self.rng.choice([0, 1, 2, 7]))

    def _abort(self, name: str, index: int | None = None) -> None:
        if self.asked[name].ranked is None:
            index = self.rng.choice([None, None, 0, index])
        if name not in self.engine.finished:
            self.cut.add(name)
        self.engine.core.abort(Abort(name, index, self.rng.choice([None, "text"])))

    def _close(self) -> None:
        """Closing works at any time, and more than once."""
        self.met["closed while compiling"] += bool(self.engine.core._compiling)
        self.engine.core.close()
        self.engine.core.close()
        assert self.engine.executor.closed
        assert self.grammars.closed

    # --------------------------------------------------------------------------------------------------- requests
    def _next(self) -> Asked:
        """The next request: of any kind, or a branch of another one."""
        asked = ask(self.rng, len(self.asked), self.crowd)
        salts = ["", "", "s", "t", f"of {len(self.asked)} alone"]
        asked.salt = self.rng.choice(salts)
        asked.params["tenant"] = self.rng.choice(["", "x", "y", "z"])
        if self.engine.core.config.adapter_slots:
            asked.adapter = self.adapters.choice(["", *ADAPTERS])
        if self.engine.core.config.policy == "priority" or self.rng.random() < 0.01:
            asked.params["priority"] = self.rng.randint(-2, 2)
        if self.asked and self.rng.random() < 0.25:
            self._branch(asked)
        return asked

    def _branch(self, asked: Asked) -> None:
        """Make it go on from some place in what another request has said so far."""
        name = self.rng.choice(list(self.asked))
        other = self.asked[name]
        said = self.engine.streams.get(self.engine.handles[name], [])
        if other.ranked is not None or not said:
            return
        whole = other.prompt + said
        count = self.rng.randint(1, len(whole))
        prompt, kept = [*whole[:count], *asked.prompt[:2]], {**asked.params}
        if len(prompt) < self.crowd.period:
            return
        asked.prompt, asked.salt, asked.ranked, asked.may_fail = prompt, other.salt, None, False
        self._answer_plainly(asked)
        asked.params |= {field: kept[field] for field in ("tenant", "priority") if field in kept}
        asked.params["source"] = Branch(name, 0, len(prompt) - 2 if len(prompt) > 2 else 1)

    def _pinned(self) -> Asked:
        """A prompt that is to stay, of a request that may fail: what it was promised is then given back."""
        prompt = STEM[: self.rng.randint(max(1, self.crowd.period), len(STEM))]
        prompt += prompt[-1:] * (-len(prompt) % self.block_size)  # as the engine fills it up
        asked = Asked(prompt, len(self.asked), 1, salt=self.rng.choice(["", "s"]))
        self._answer_plainly(asked)
        if self.rng.random() < 0.2 and not self.crowd.period:
            grammar = self.rng.choice([*FAILING_GRAMMARS, "refused"])
            constrain(asked, grammar)
            asked.may_fail = True
        return asked

    def _answer_plainly(self, asked: Asked) -> None:
        if self.crowd.period:
            echo(self.rng, asked, self.crowd.period)
        else:
            plain(self.rng, asked)

    def _submit(self, asked: Asked, pin: str = "") -> None:
        name, core = f"r{len(self.asked) + self.met['refused']}", self.engine.core
        reserved, self.faults.submitted = core.pins.num_reserved, name
        asked.length = min(asked.length, core.config.max_model_len - len(asked.prompt))
        try:
            self.engine.submit(
                name, asked.prompt, max_tokens=asked.length, seed=asked.seed, end_ids=END_IDS, pin=pin,
                salt=asked.salt, adapter=asked.adapter, **asked.params,
            )  # fmt: skip
        except InvalidRequest as refusal:
            if refusal.field not in (*REFUSALS, "prompt" if pin else "") or (
                refusal.field == "request" and name not in self.faults.struck
            ):
                raise
            assert core.pins.num_reserved == reserved
            self.met["refused"] += 1
        else:
            self.asked[name] = asked
            self.met["branches"] += "source" in asked.params
            self.met["pinned"] += bool(pin)
        self.faults.submitted = ""

    # ---------------------------------------------------------------------------------------------------- answers
    def _check_idle(self) -> None:
        """Every request had one last message, and nothing is held for any of them."""
        core, scheduler = self.engine.core, self.engine.core._scheduler
        assert set(self.engine.finished) == set(self.asked)
        assert not core._compiling
        assert not core.pins._reservations
        core.pins.reset()
        stats = core.stats()
        assert stats.blocks.used == core.pins.num_reserved == 0
        assert stats.tiers.host_held <= self.engine.tiers.num_queued
        assert scheduler.rows.num_taken == scheduler.rows._num_reserved == 0
        assert not scheduler.paced.due
        assert not scheduler.paced.draining
        if isinstance(self.proposers, NgramProposers):
            unclosed = sum(fault.num_strikes for fault in self.faults.planted if fault.site.endswith(".close"))
            assert self.proposers.num_slots - len(self.proposers._abandoned) <= unclosed

    def _check(self, name: str, asked: Asked, message: Finished) -> None:
        samples, is_whole = message.samples, name not in self.cut and message.error is None
        if message.error is not None:
            assert (name in self.faults.struck and "spoiled" in message.error) or asked.may_fail, message.error
            self.met["failed"] += 1
            assert len({sample.index for sample in samples}) == len(samples)
        else:
            assert [sample.index for sample in samples] == list(range(len(samples)))
        if asked.ranked is not None:
            if is_whole:
                assert [sample.token_ids for sample in samples] == asked.ranked
                assert all(sample.score is not None and sample.cumulative_logprob is not None for sample in samples)
            return
        assert message.error is not None or len(samples) == asked.params["n"]
        for sample in samples:
            wanted = asked.tokens(sample.index)
            if not is_whole:
                wanted = wanted[: len(sample.token_ids)]
            assert list(sample.token_ids) == wanted
            assert self.engine.streams.get(self.engine.handles[name] + sample.index, []) == wanted
            assert message.error is not None or len(sample.logprobs) in (0, len(wanted))
            assert [int(entry.token_ids[0]) for entry in sample.logprobs] in ([], wanted)

    def _check_salts(self) -> None:
        """A request finds nothing in the cache if no other request has its salt. The executor checks at every step that
        no row reads what was written under another salt: see SaltMarks."""
        counts = Counter((asked.salt, asked.adapter) for asked in self.asked.values())
        for name, message in self.engine.finished.items():
            salt, adapter = self.asked[name].salt, self.asked[name].adapter
            if counts[salt, adapter] == 1 and salt not in self.old_salts:
                self.met["salts of their own"] += 1
                assert message.num_cached_tokens == 0

    @property
    def salts(self) -> frozenset[str]:
        return frozenset(asked.salt for asked in self.asked.values())

    def exercised(self) -> Counter[str]:
        """How often a run met what it is there to meet."""
        stats, messages = self.engine.core.stats(), self.engine.finished
        are_whole = {name for name, message in messages.items() if message.error is None and name not in self.cut}
        whole = [asked for name, asked in self.asked.items() if name in are_whole]
        met = {
            self.engine.core.config.policy: len(whole),
            self.engine.core._cache.eviction: stats.evicted_blocks,
            "answers compared": len(whole),
            "plain": sum(asked.ranked is None and not asked.grammar for asked in whole),
            "toy grammars": sum(asked.grammar not in ("", *REAL_GRAMMARS) for asked in whole),
            "real grammars": sum(asked.grammar in REAL_GRAMMARS for asked in whole),
            "best_of": sum("best_of" in asked.params for asked in whole),
            "beams": sum("beam" in asked.params for asked in whole),
            "cut off": len(self.cut),
            "drafts": stats.drafts,
            "adapters": sum(bool(asked.adapter) for asked in whole),
            "waits for a slot": sum(NO_SLOT in entry.note for message in messages.values() for entry in message.ledger),
            "looked up drafts": stats.drafts if self.crowd.period else 0,
            "ordered drafts": stats.drafts if isinstance(self.proposers, RuntimeDraftProposers) else 0,
            "cached": stats.prefix_hits,
            "evicted": stats.evicted_blocks,
            "recomputed": stats.preemptions - stats.swaps,
            "swapped": stats.swaps,
            "from host memory": stats.host_hits,
            "from disk": stats.disk_hits,
            "files lost": sum(stats.tiers.failures.values()),
        }
        return self.met + Counter(met) + self.faults.counts()
