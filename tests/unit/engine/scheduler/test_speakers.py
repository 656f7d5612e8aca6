"""What running requests say is found by others; random loads where some run ahead while prompts are let in."""

from __future__ import annotations

import random

import pytest

from harness import VOCABULARY, Harness
from quire.config.policy import PolicySettings
from quire.engine.decoding.tools import DecodingTools
from quire.engine.kvcache.table import BlockTable
from quire.types.errors import InvalidRequest
from toy_decoding import ToyGrammars, ToyProposers


@pytest.mark.parametrize("seed", [4, 10, 19, 28, 53, 54])
def test_a_full_block_that_is_left_while_its_speaker_runs_ahead_is_not_copied(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding pauses to let prompts in, and those go on with what running requests have said."""
    unshare = BlockTable._unshare_tail

    def watch(table: BlockTable) -> object:
        is_whole = table.trail is not None and table.trail.depth == len(table.blocks)
        assert not is_whole, "a full block was copied as if it were a partial one"
        return unshare(table)

    monkeypatch.setattr(BlockTable, "_unshare_tail", watch)
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
