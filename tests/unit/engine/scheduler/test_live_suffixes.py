"""What generating sequences have said is found by others: the index against a search through all of them, and random
loads in which some run ahead while prompts are admitted."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from cached_tables import CachedTables, pack
from harness import VOCABULARY, Harness
from plain_groups import add_sequence, make_group
from quire.config.policy import PolicySettings
from quire.engine.decoding.group import Sequence
from quire.engine.decoding.tools import DecodingTools
from quire.engine.kvcache.table import BlockTable
from quire.engine.scheduler.publishing import LiveSuffixIndex
from quire.types.errors import InvalidRequest
from quire.types.step import BlockCopy
from toy_decoding import ToyGrammars, ToyProposers

SALTS = ("", "a")


@dataclass(eq=False)
class Live:
    """A sequence that generates: its prompt and what it has said so far."""

    sequence: Sequence
    prompt: list[int]
    outputs: list[int]
    is_detached: bool = False  # the tree was cleared since

    @property
    def salt(self) -> str:
        return self.sequence.group.request.cache_salt

    def could_extend(self, salt: str, tokens: list[int], num_blocks: int, size: int) -> bool:
        """Whether its tokens go on where a match of these tokens ends, as far as the prompt says."""
        own, end = [*self.prompt, *self.outputs], num_blocks * size
        rest = self.prompt[end:]
        return (
            not self.is_detached
            and self.salt == salt
            and self.sequence.table.num_cached == num_blocks
            and own[:end] == tokens[:end]
            and len(rest) < size
            and tokens[end : end + len(rest)] == rest
        )


class Play:
    """Sequences come, say more, publish, and go; the index is compared with a search through all of them."""

    def __init__(self, seed: int, size: int) -> None:
        self.rng, self.size = random.Random(seed), size
        self.cache, self.index = CachedTables(400, size), LiveSuffixIndex(size)
        self.live: list[Live] = []
        self.number = self.num_found = 0

    def draw(self, length: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(length)]

    def come(self) -> None:
        rng, salt = self.rng, self.rng.choice(SALTS)
        begun = rng.choice(self.live) if self.live else None
        prompt = (
            [*begun.prompt, *begun.outputs][: rng.randint(1, 5 * self.size)] if begun and rng.random() < 0.6 else []
        )
        prompt += self.draw(rng.randint(1, 2 * self.size))
        self.number += 1
        sequence = add_sequence(make_group(prompt, self.number, salt=salt), self.cache.hold(prompt, salt))
        sequence.row = self.number
        self.live.append(Live(sequence, prompt, []))
        self.index.enter(sequence)

    def say(self, live: Live) -> None:
        tokens = self.draw(self.rng.randint(1, 2 * self.size))
        live.sequence.table.append(len(tokens))
        live.outputs += tokens

    def publish(self, live: Live) -> None:
        if not live.is_detached:
            self.cache.publish(live.sequence.table, [*live.prompt, *live.outputs])
            self.index.refresh(live.sequence)

    def go(self, live: Live) -> None:
        self.live.remove(live)
        self.index.discard(live.sequence)
        self.index.discard(live.sequence)
        live.sequence.table.free()

    def clear(self) -> None:
        self.cache.tree.clear()
        self.index = LiveSuffixIndex(self.size)  # as whoever clears the tree does
        for live in self.live:
            live.is_detached = True
            self.index.enter(live.sequence)  # changes nothing: nobody can find it any more

    def play(self) -> None:
        rng, choice = self.rng, self.rng.random()
        if choice < 0.2 or not self.live:
            self.come()
        elif choice < 0.5:
            self.say(rng.choice(self.live))
        elif choice < 0.8:
            self.publish(rng.choice(self.live))
        elif choice < 0.81:
            self.clear()
        elif len(self.live) > 6 or choice > 0.93:
            self.go(rng.choice(self.live))

    def compare(self) -> None:
        """Look for what some sequence has said, perhaps cut off, perhaps with other tokens behind it."""
        self.index.check()
        rng = self.rng
        if not self.live:
            return
        chosen = rng.choice(self.live)
        said = [*chosen.prompt, *chosen.outputs]
        tokens = [*said[: rng.randint(0, len(said))], *self.draw(rng.randint(0, self.size))]
        match = self.cache.match(tokens, chosen.salt)
        found = self.index.find(match, pack(tokens))
        assert len(set(found)) == len(found)
        wanted = [each for each in self.live if each.could_extend(chosen.salt, tokens, match.num_blocks, self.size)]
        rest = len(tokens) - match.num_blocks * self.size
        needed = [each for each in wanted if max(len(each.prompt) - match.num_blocks * self.size, 0) < rest]
        assert {each.sequence for each in needed} <= set(found) <= {each.sequence for each in wanted}
        self.num_found += len(found)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_the_index_finds_whom_a_search_through_all_sequences_finds(size: int, seed: int) -> None:
    game = Play(seed, size)
    for _ in range(600):
        game.play()
        game.compare()
        game.compare()
    assert game.num_found > 100
    for live in list(game.live):
        game.go(live)
    game.index.check()
    assert not game.index._places
    assert not game.index._sequences


def test_a_sequence_whose_node_is_split_is_found_as_before() -> None:
    cache, index = CachedTables(32, 2), LiveSuffixIndex(2)
    sequence = add_sequence(make_group([1, 2, 3, 4, 5]), cache.hold([1, 2, 3, 4, 5]))
    sequence.row = 0
    index.enter(sequence)
    cache.hold([1, 2, 9, 9])
    index.check()
    tokens = [1, 2, 3, 4, 5, 6]
    assert index.find(cache.match(tokens), pack(tokens)) == [sequence]
    assert index.find(cache.match([1, 2, 3, 4, 6, 6]), pack([1, 2, 3, 4, 6, 6])) == []


def test_a_prompt_of_which_another_table_caches_the_next_block_is_not_in_the_index() -> None:
    """Its own blocks are never published, so nobody needs to look at it."""
    cache, index = CachedTables(32, 2), LiveSuffixIndex(2)
    table = cache.begin([1, 2, 3, 4])
    table.append(5)
    cache.hold([1, 2, 3, 4])
    sequence = add_sequence(make_group([1, 2, 3, 4, 5]), table)
    sequence.row = 0
    index.enter(sequence)
    index.check()
    assert not index._places


@pytest.mark.parametrize("seed", [4, 10, 19, 28, 53, 54])
def test_a_full_block_that_is_published_while_its_sequence_runs_ahead_is_not_copied(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding pauses to admit prompts, and those go on with what running requests have said."""
    append = BlockTable.append

    def watch(table: BlockTable, num_tokens: int = 1) -> list[BlockCopy]:
        is_cached = table.num_cached == len(table.blocks)
        copies = append(table, num_tokens)
        assert not (copies and is_cached), "a full block was copied as if it were a partial one"
        return copies

    monkeypatch.setattr(BlockTable, "append", watch)
    rng = random.Random(seed)
    size, num_blocks = rng.choice([2, 4]), rng.choice([8, 12, 20])
    tools = DecodingTools(ToyGrammars(), ToyProposers(rng.random() < 0.5, True), lambda: VOCABULARY)
    engine = Harness(
        num_blocks=num_blocks,
        block_size=size,
        depth=rng.choice([1, 2]),
        policy="waiting_served_ratio",
        tools=tools,
        policy_settings=PolicySettings(waiting_served_ratio=0.0, max_waiting_tokens=1),
        max_num_batched_tokens=rng.choice([4, 8, 16]),
        max_num_seqs=6,
    )
    prompts: dict[str, list[int]] = {}
    half, num_follow_ups = num_blocks * size // 2, 0
    for number in range(300):
        if rng.random() < 0.3:
            name = f"r{number}"
            is_short = rng.random() < 0.5
            prompt = [5] * rng.randint(1, 4) if is_short else [rng.randrange(9) for _ in range(rng.randint(1, half))]
            running = [each for each in engine.handles if each not in engine.finished]
            if running and rng.random() < 0.6:
                other = rng.choice(running)
                prompt = prompts[other] + engine.streams.get(engine.handles[other], []) + [1]
                num_follow_ups += 1
            try:
                engine.submit(name, prompt, max_tokens=rng.randint(1, half), seed=rng.choice([1, 101 + number]))
                prompts[name] = prompt
            except InvalidRequest:
                continue
        engine.step()
        assert not engine.core.dead
    assert num_follow_ups > 10
    assert len(engine.finished) > 10
