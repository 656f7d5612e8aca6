"""Prompts that are computed or being computed: nobody computes the same prefix beside them. The index against a search
through all such prompts, and what an engine does with it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from cached_tables import CachedTables, pack
from fake_executor import VOCAB, FakeExecutor, continuation
from plain_groups import add_sequence, make_group
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.decoding.group import Group, Sequence
from quire.engine.scheduler.publishing import PromptsInProgress
from quire.types.output import Finished
from quire.types.request import Abort, Submit
from quire.types.sampling import SamplingParams

SALTS = ("", "a")


@dataclass(eq=False)
class Computing:
    """A prompt that is being computed, block by block. Its blocks are published when somebody looks for them."""

    sequence: Sequence
    prompt: list[int]
    is_detached: bool = False  # the tree was cleared since

    @property
    def salt(self) -> str:
        return self.sequence.group.request.cache_salt

    @property
    def num_published(self) -> int:
        return self.sequence.table.num_cached


@dataclass(eq=False)
class Waiting:
    """A group that waits until a prompt has computed so many blocks."""

    group: Group
    other: Computing
    num_shared: int


class Play:
    """Prompts are begun, computed, published and given up; groups wait for them. All of it is compared with plain
    lists."""

    def __init__(self, seed: int, size: int) -> None:
        self.rng, self.size = random.Random(seed), size
        self.cache, self.index = CachedTables(400, size), PromptsInProgress(size)
        self.computing: list[Computing] = []
        self.claims: dict[tuple[str, tuple[int, ...]], Computing] = {}  # whose next block leads to these tokens
        self.waiting: list[Waiting] = []
        self.number = self.num_woken = self.num_found = 0

    def draw(self) -> list[int]:
        """A prompt that begins like others, as there are few blocks to choose from."""
        rng, size = self.rng, self.size
        blocks = [[rng.randrange(2)] * size for _ in range(rng.randint(0, 6))]
        return [token for block in blocks for token in block] + [rng.randrange(2) for _ in range(rng.randint(1, size))]

    def next_group(self, prompt: list[int], salt: str) -> Group:
        self.number += 1
        return make_group(prompt, self.number, salt=salt)

    # ----------------------------------------------------------------------------------------------------- operations
    def begin(self) -> None:
        prompt, salt = self.draw(), self.rng.choice(SALTS)
        table = self.cache.begin(prompt, salt, len(prompt) - 1)
        sequence = add_sequence(self.next_group(prompt, salt), table)
        sequence.row = self.number
        each = Computing(sequence, prompt)
        self.computing.append(each)
        self.place(each)

    def compute(self, each: Computing) -> None:
        """Some tokens more; groups that share no more than that wait no longer."""
        table = each.sequence.table
        num_tokens = min(table.num_tokens + self.rng.randint(1, 2 * self.size), len(each.prompt))
        table.append(num_tokens - table.num_tokens)
        is_whole = num_tokens == len(each.prompt)
        num_blocks = num_tokens // self.size
        woken = self.index.wake(each.sequence, None if is_whole else num_blocks)
        done = [
            waiter for waiter in self.waiting if waiter.other is each and (is_whole or waiter.num_shared <= num_blocks)
        ]
        self.expect(woken, done)

    def publish(self, each: Computing) -> None:
        """Publish what is computed, unless another has cached the same blocks."""
        table = each.sequence.table
        if not each.is_detached and not table.is_duplicate:
            match = self.cache.match(each.prompt, each.salt, table.num_tokens)
            if match.num_blocks > each.num_published:
                table.is_duplicate = True
            else:
                self.cache.publish(table, each.prompt[: table.num_tokens])
        self.place(each)

    def place(self, each: Computing) -> None:
        self.index.enter(each.sequence)
        self.unclaim(each)
        end = (each.num_published + 1) * self.size
        if not each.is_detached and not each.sequence.table.is_duplicate and end <= len(each.prompt):
            self.claims.setdefault((each.salt, tuple(each.prompt[:end])), each)

    def give_up(self, each: Computing) -> None:
        self.computing.remove(each)
        woken = self.index.remove(each.sequence)
        self.unclaim(each)
        self.expect(woken, [waiter for waiter in self.waiting if waiter.other is each])
        assert self.index.remove(each.sequence) == []
        each.sequence.table.free()

    def look(self) -> None:
        """A group looks for somebody who computes what it would compute first, and waits for it."""
        prompt, salt = self.draw(), self.rng.choice(SALTS)
        group, limit = self.next_group(prompt, salt), len(prompt) - 1
        match = self.cache.match(prompt, salt, limit)
        found = self.index.find(match, pack(prompt), limit)
        end = (match.num_blocks + 1) * self.size
        other = self.claims.get((salt, tuple(prompt[:end]))) if end <= limit else None
        assert found is (None if other is None else other.sequence)
        if other is not None:
            self.num_found += 1
            blocks = range(1, min(limit, len(other.prompt)) // self.size + 1)
            shared = sum(prompt[: count * self.size] == other.prompt[: count * self.size] for count in blocks)
            self.index.wait(group, other.sequence, limit)
            self.waiting.append(Waiting(group, other, shared))

    def forget(self, waiter: Waiting) -> None:
        self.waiting.remove(waiter)
        self.index.forget(waiter.group)
        self.index.forget(waiter.group)

    def clear(self) -> None:
        self.cache.tree.clear()
        self.claims.clear()
        self.expect(self.index.clear(), list(self.waiting))
        for each in self.computing:
            each.is_detached = True

    # ------------------------------------------------------------------------------------------------------ comparing
    def unclaim(self, each: Computing) -> None:
        self.claims = {key: other for key, other in self.claims.items() if other is not each}

    def expect(self, woken: list[Group], wanted: list[Waiting]) -> None:
        assert len(set(woken)) == len(woken)
        assert set(woken) == {waiter.group for waiter in wanted}
        self.num_woken += len(woken)
        self.waiting = [waiter for waiter in self.waiting if waiter not in wanted]

    def play(self) -> None:
        rng, choice = self.rng, self.rng.random()
        if choice < 0.15 or not self.computing:
            self.begin()
        elif choice < 0.4:
            self.compute(rng.choice(self.computing))
        elif choice < 0.5:
            self.publish(rng.choice(self.computing))
        elif choice < 0.8:
            self.look()
        elif choice < 0.85 and self.waiting:
            self.forget(rng.choice(self.waiting))
        elif choice < 0.86:
            self.clear()
        elif len(self.computing) > 5 or choice > 0.95:
            self.give_up(rng.choice(self.computing))
        self.index.check()


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_groups_wait_for_whom_a_search_finds_and_are_woken_when_what_they_share_is_computed(
    size: int, seed: int
) -> None:
    game = Play(seed, size)
    for _ in range(1_000):
        game.play()
    assert game.num_found > 50
    assert game.num_woken > 20
    for each in list(game.computing):
        game.give_up(each)
    assert not game.waiting


def test_of_two_prompts_that_compute_the_same_block_the_first_is_found_until_it_goes_on() -> None:
    cache, index = CachedTables(16, 2), PromptsInProgress(2)
    one, two = (add_sequence(make_group([1, 2, 3, 4], number), cache.begin([1, 2, 3, 4])) for number in range(2))
    for row, sequence in enumerate((one, two)):
        sequence.row = row
        index.enter(sequence)
    wanted = pack([1, 2, 3, 4])
    assert index.find(cache.match([1, 2, 3, 4], limit=3), wanted, 3) is one
    index.remove(one)
    assert index.find(cache.match([1, 2, 3, 4], limit=3), wanted, 3) is None
    index.enter(two)
    assert index.find(cache.match([1, 2, 3, 4], limit=3), wanted, 3) is two


# ------------------------------------------------------------------------------------------------------- in an engine
SHARED = tuple(place * 7 % 50 for place in range(40))


def engine(*, caching: bool = True, budget: int = 16) -> tuple[EngineCore, FakeExecutor]:
    executor = FakeExecutor(64, 4)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=80)
    return EngineCore(executor, CacheConfig(4, 64, enable_prefix_caching=caching), scheduler, VOCAB), executor


def submit(core: EngineCore, name: str, prompt: tuple[int, ...], *, salt: str = "", **sampling: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=0, **sampling)
    core.submit(Submit(name, prompt, params, cache_salt=salt))


def run(core: EngineCore) -> dict[str, Finished]:
    finished: dict[str, Finished] = {}
    while core.has_work:
        finished |= {end.request_id: end for end in core.step().finished}
        core.check()
    return finished


def num_computed(executor: FakeExecutor) -> int:
    return sum(chunk.num_tokens for plan in executor.plans for chunk in plan.chunks)


@pytest.mark.parametrize("budget", [16, 24, 64])
def test_what_requests_share_is_computed_once_even_if_they_come_together(budget: int) -> None:
    core, executor = engine(budget=budget)
    prompts = {f"r{number}": (*SHARED, number, number + 1) for number in range(5)}
    for name, prompt in prompts.items():
        submit(core, name, prompt)
    finished = run(core)
    assert num_computed(executor) == len(SHARED) + 5 * 2
    for name, prompt in prompts.items():
        assert list(finished[name].samples[0].token_ids) == continuation(list(prompt), 4, seed=0)


def test_prompts_that_part_before_the_next_block_do_not_wait() -> None:
    core, executor = engine(budget=64)
    submit(core, "one", (*SHARED[:6], *range(10)))
    submit(core, "two", (*SHARED[:6], *range(20, 30)))
    core.step()
    assert len(executor.plans[0].chunks) == 1  # the first block is the same
    core.step()
    assert [chunk.start for chunk in executor.plans[1].chunks] == [6]  # and two more tokens were found as well
    run(core)


@pytest.mark.parametrize("other", [{"salt": "other"}, {"prompt_logprobs": 0}])
def test_nobody_waits_for_what_it_may_not_read(other: dict[str, int]) -> None:
    core, executor = engine(budget=200)
    submit(core, "one", (*SHARED, 1))
    submit(core, "two", (*SHARED, 2), **other)
    core.step()
    assert len(executor.plans[0].chunks) == 2
    run(core)


def test_without_a_cache_nobody_waits() -> None:
    core, executor = engine(caching=False, budget=200)
    submit(core, "one", (*SHARED, 1))
    submit(core, "two", (*SHARED, 2))
    core.step()
    assert len(executor.plans[0].chunks) == 2
    run(core)


def test_a_group_that_waits_goes_on_when_the_one_it_waits_for_is_aborted() -> None:
    core, executor = engine(budget=16)
    submit(core, "one", (*SHARED, 1))
    submit(core, "two", (*SHARED, 2))
    core.step()
    core.step()
    assert core._scheduler.waiting.num_ready == 0
    core.abort(Abort("one"))
    core.step()
    assert [[chunk.start for chunk in plan.chunks] for plan in executor.plans] == [
        [0],
        [16],
        [32],
    ]  # of "two": the last
    finished = run(core)
    assert list(finished["two"].samples[0].token_ids) == continuation([*SHARED, 2], 4, seed=0)
    assert "request one computes the same prefix" in str(finished["two"].ledger)


def test_a_group_that_waits_can_be_aborted() -> None:
    core, executor = engine(budget=16)
    submit(core, "one", (*SHARED, 1))
    submit(core, "two", (*SHARED, 2))
    core.step()
    core.step()
    core.abort(Abort("two"))
    core.check()
    finished = run(core)
    assert finished["two"].samples[0].finish_reason == "abort"
    assert len(finished["one"].samples[0].token_ids) == 4
    assert num_computed(executor) == len(SHARED) + 1
