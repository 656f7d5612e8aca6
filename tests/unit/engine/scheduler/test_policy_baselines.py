from __future__ import annotations

import pytest

from harness import Harness
from quire.config.policy import PolicyName
from quire.types.errors import ConfigError, InvalidRequest
from quire.types.request import Branch

ORCA: list[PolicyName] = ["orca-max", "orca-pow2", "orca-oracle"]


def make(policy: PolicyName, **settings: object) -> Harness:
    settings = {"num_blocks": 32, "max_model_len": 64, "caching": False, **settings}
    return Harness(policy=policy, **settings)  # type: ignore[arg-type]


def held(engine: Harness) -> dict[str, tuple[int, ...]]:
    return {each.request_id: each.block_ids for each in engine.core.block_map().requests if each.block_ids}


@pytest.mark.parametrize(("policy", "blocks"), [("orca-max", 16), ("orca-pow2", 7), ("orca-oracle", 6)])
def test_a_run_of_blocks_is_reserved_at_admission_and_never_grows(policy: PolicyName, blocks: int) -> None:
    engine = make(policy)
    engine.submit("a", [1] * 10, max_tokens=14)  # 24 tokens; 10 + 16
    engine.submit("b", [2] * 10, max_tokens=14)
    seen = []
    while engine.core.has_work:
        engine.step()
        seen.append(held(engine))
        for run in seen[-1].values():
            assert run == tuple(range(run[0], run[0] + blocks))
    assert len(seen[0]) == 2
    assert engine.core.stats().preemptions == 0


def test_who_finds_no_run_waits_even_if_blocks_are_free() -> None:
    engine = make("orca-oracle", num_blocks=12)
    engine.submit("a", [1] * 4, max_tokens=4)  # 2 blocks, the first to end
    engine.submit("b", [2] * 4, max_tokens=28)  # 8 blocks
    engine.submit("c", [3] * 4, max_tokens=4)  # 2 blocks
    engine.submit("d", [4] * 4, max_tokens=12)  # 4 blocks, but those of a and c do not touch
    while not {"a", "c"} <= engine.finished.keys():
        engine.step()
    engine.step()
    blocks = engine.core.stats().blocks
    assert blocks.free == 4
    assert set(held(engine)) == {"b"}
    engine.run()
    assert "waited: no free blocks" in [entry.note for entry in engine.finished["d"].ledger]


def test_a_static_batch_runs_to_its_end_before_the_next_is_admitted() -> None:
    engine = make("static", max_num_seqs=3)
    lengths = {"a": 2, "b": 12, "c": 5, "d": 3, "e": 3}
    for name, length in lengths.items():
        engine.submit(name, [1] * 4, max_tokens=length)
    batches = []
    while engine.core.has_work:
        engine.step()
        running = frozenset(held(engine))
        if running and (not batches or not running <= batches[-1]):
            batches.append(running)
            assert {len(run) for run in held(engine).values()} == {4 if "b" in running else 2}  # the longest of them
        if "b" in running:
            assert engine.core.stats().blocks.used == 3 * 4  # also when a and c are over
    assert batches == [{"a", "b", "c"}, {"d", "e"}]


def test_a_static_batch_computes_all_prompts_before_it_decodes() -> None:
    engine = make("static", max_num_batched_tokens=8)
    for name in "abc":
        engine.submit(name, [1] * 6, max_tokens=4)
    engine.run()
    plans = engine.executor.plans
    decoding = [bool(len(plan.decode_rows)) for plan in plans]
    assert decoding == sorted(decoding)
    assert not any(plan.chunks and len(plan.decode_rows) for plan in plans)


def test_a_static_batch_takes_as_many_as_fit_padded() -> None:
    engine = make("static", num_blocks=12)
    for name, length in (("a", 4), ("b", 4), ("c", 28), ("d", 4)):
        engine.submit(name, [1] * 4, max_tokens=length)
    engine.step()
    assert set(held(engine)) == {"a", "b"}  # with c, three rows of eight blocks would be needed
    engine.run()


@pytest.mark.parametrize("policy", [*ORCA, "static"])
def test_what_needs_shared_memory_is_refused_by_name(policy: PolicyName) -> None:
    engine = make(policy)
    with pytest.raises(InvalidRequest, match="n: is 2"):
        engine.submit("a", [1], n=2)
    with pytest.raises(InvalidRequest, match="best_of: is 3"):
        engine.submit("a", [1], best_of=3)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        make(policy, caching=True)


def test_what_could_never_be_reserved_is_refused() -> None:
    engine = make("orca-pow2", num_blocks=8)
    with pytest.raises(InvalidRequest, match="max_tokens.*reserve 36 tokens, the cache has 32"):
        engine.submit("a", [1] * 4, max_tokens=17)
    engine.submit("b", [1] * 4, max_tokens=16)
    engine.run()


@pytest.mark.parametrize("policy", [*ORCA, "static"])
def test_a_branch_computes_its_prompt_anew(policy: PolicyName) -> None:
    engine = make(policy, num_blocks=64)
    engine.submit("a", [1] * 10, max_tokens=20)
    engine.step()
    engine.submit("b", [1] * 10, max_tokens=4, source=Branch("a", 0, 10))
    while "b" not in engine.finished:
        engine.step()
        assert engine.core.stats().blocks.shared == 0
    engine.run()
