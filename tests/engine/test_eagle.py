"""Drafts by EAGLE-3 heads beside a reference in plain torch: one position after the other, no cache, no batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_heads import Draft, head_config, knowing_head, memoryless, random_head, record
from quire.config.model import Heads, ModelConfig
from quire.engine.speculation.draft_length import DraftLength
from quire.types.request import Abort
from tiny_models import MemoryCheckpoint, random_checkpoint, tiny_config
from worker_executor import TinyEngine

CONFIG = tiny_config(num_layers=4)
TARGET = random_checkpoint(CONFIG)
LAYERS = (1, 2, 3)
HEAD = random_head(head_config(CONFIG, LAYERS, drafted=40))
METHOD: dict[str, Any] = {"model": "head", "num_speculative_tokens": 3}


pytestmark = pytest.mark.usefixtures("one_thread")


def engine(head: MemoryCheckpoint | None = HEAD, target: MemoryCheckpoint = TARGET, **settings: Any) -> TinyEngine:
    """Drafts are as long as they may be."""
    made = TinyEngine(target, None if head is None else METHOD, draft=head, **settings)
    if head is not None:
        made.proposers.lengths.length = lambda *given, **rest: DraftLength(given[1])  # type: ignore[attr-defined]
    return made


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def attend(x: Tensor, tensors: dict[str, Tensor], path: str, config: ModelConfig) -> Tensor:
    """Causal attention of all positions."""
    heads, count = config.heads, len(x)
    query, key, value = (
        F.linear(x, tensors[f"{path}.{name}_proj.weight"]).view(count, -1, heads.dim).transpose(0, 1) for name in "qkv"
    )
    inverse = config.rope.theta ** (-torch.arange(0, heads.dim, 2) / heads.dim)
    angles = torch.outer(torch.arange(count), inverse).repeat(1, 2)

    def turn(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        return y * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    key, value = (each.repeat_interleave(heads.num_query // heads.num_kv, dim=0) for each in (key, value))
    read = F.scaled_dot_product_attention(turn(query)[None], turn(key)[None], value[None], is_causal=True)[0]
    return F.linear(read.transpose(0, 1).reshape(count, -1), tensors[f"{path}.o_proj.weight"])


def mlp(x: Tensor, tensors: dict[str, Tensor], path: str) -> Tensor:
    gate, up = (F.linear(x, tensors[f"{path}.{name}_proj.weight"]) for name in ("gate", "up"))
    return F.linear(F.silu(gate) * up, tensors[f"{path}.down_proj.weight"])


def target_states(target: MemoryCheckpoint, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """What these layers are given, side by side: [tokens, layers * hidden]."""
    tensors, config, found = target.tensors, target.config, []
    x = tensors["model.embed_tokens.weight"][list(tokens)]
    for layer in range(config.num_layers):
        found += [x] if layer in layers else []
        path = f"model.layers.{layer}"
        x = x + attend(
            norm(x, tensors[f"{path}.input_layernorm.weight"], config.norm_eps), tensors, f"{path}.self_attn", config
        )
        y = norm(x, tensors[f"{path}.post_attention_layernorm.weight"], config.norm_eps)
        x = x + mlp(y, tensors, f"{path}.mlp")
    return torch.cat(found, dim=1)


def reference_draft(target: MemoryCheckpoint, head: MemoryCheckpoint, tokens: Sequence[int], count: int) -> list[int]:
    """What the head drafts after `tokens`: each token by a pass over all positions."""
    eagle, tensors, eps, path = head.config.eagle, head.tensors, head.config.norm_eps, "layers.0"
    assert eagle is not None
    features = F.linear(target_states(target, tokens[:-1], eagle.layers), tensors["fc.weight"])
    drafted: list[int] = []
    for _ in range(count):
        embedded = target.tensors["model.embed_tokens.weight"][[*tokens[1:], *drafted]]
        normed = norm(features, tensors[f"{path}.hidden_norm.weight"], eps)
        both = torch.cat((norm(embedded, tensors[f"{path}.input_layernorm.weight"], eps), normed), dim=1)
        x = normed if eagle.norms_stream else features
        x = x + attend(both, tensors, f"{path}.self_attn", head.config)
        x = x + mlp(norm(x, tensors[f"{path}.post_attention_layernorm.weight"], eps), tensors, f"{path}.mlp")
        chosen = int(F.linear(norm(x[-1], tensors["norm.weight"], eps), tensors["lm_head.weight"]).argmax())
        drafted.append(chosen + int(tensors["d2t"][chosen]) if "d2t" in tensors else chosen)
        features = torch.cat((features, x[-1:]))
    return drafted


def check(drafts: Sequence[Draft], head: MemoryCheckpoint = HEAD, target: MemoryCheckpoint = TARGET) -> None:
    assert drafts
    for tokens, drafted in drafts:
        assert list(drafted) == reference_draft(target, head, tokens, len(drafted)), tokens


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize(
    "head",
    [
        HEAD,
        random_head(head_config(CONFIG, LAYERS), seed=1),
        random_head(head_config(CONFIG, (0, 2), heads=Heads(6, 1, 8)), seed=2),
        random_head(head_config(CONFIG, LAYERS, drafted=50, norms_stream=True), seed=3),
    ],
    ids=["part of the vocabulary", "all of it", "two layers", "a normed stream"],
)
def test_drafts_are_those_of_the_reference_and_answers_those_of_plain_decoding(
    head: MemoryCheckpoint, attention: str
) -> None:
    asked = prompts(5)
    made = engine(head, attention=attention)
    drafts = record(made)
    assert made.answers(asked, max_tokens=12) == engine(None).answers(asked, max_tokens=12)
    check(drafts, head)
    made.executor.worker.check()


@pytest.mark.parametrize(("drafted", "tensor", "attention"), [(40, 2, "auto"), (None, 2, "reference"), (41, 3, "auto")])
def test_ranks_share_the_head_and_draft_what_one_drafts(drafted: int | None, tensor: int, attention: str) -> None:
    """Also a vocabulary that does not divide by the ranks."""
    head, asked = random_head(head_config(CONFIG, LAYERS, drafted=drafted), seed=4), prompts(5, 30, seed=13)
    sampling: dict[str, Any] = {"temperature": 1.0, "n": 2, "seed": 3, "max_tokens": 12}
    greedy, sampled = engine(None).answers(asked, max_tokens=24), engine(None).answers(asked[:2], **sampling)
    for num_blocks in (21, 128):  # of which the first are too few for all
        made = engine(
            head, tensor=tensor, attention=attention, budget=7, rows=6, num_blocks=num_blocks, block_size=4, max_len=80
        )
        drafts = record(made)
        assert made.answers(asked, max_tokens=24) == greedy
        check(drafts[:30], head)
        assert made.answers(asked[:2], **sampling) == sampled
        stats = made.core.stats()
        assert stats.preemptions > 0 if num_blocks == 21 else stats.prefix_hits > 0
        made.executor.close()


def test_a_head_that_ranks_share_and_that_knows_its_target_is_right() -> None:
    target, asked = memoryless(TARGET), prompts(4, 24, seed=9)
    made = engine(knowing_head(TARGET, LAYERS), target, tensor=2, rows=6)
    assert made.answers(asked, n=2) == engine(None, target).answers(asked, n=2)
    stats = made.core.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    made.executor.close()


def test_chunks_of_prompts_leave_features_for_the_head() -> None:
    asked = prompts(3, 60, seed=4)
    made = engine(budget=7, rows=4, block_size=4)
    drafts = record(made)
    assert made.answers(asked) == engine(None).answers(asked)
    check(drafts)
    assert max(chunk.num_tokens for plan in made.executor.plans for chunk in plan.chunks) <= 7


def test_a_row_reads_features_and_entries_in_blocks_of_the_prefix_cache() -> None:
    """Others with the same prefix and other tokens behind it come one after the other."""
    made = engine(block_size=4)
    drafts, prefix = record(made), prompts(1, 30, seed=5)[0] + [1] * 12
    for tail in ([5], [6, 7], [5, 9, 3]):
        drafts.clear()
        asked = [prefix[: len(prefix) // 4 * 4] + tail]
        assert made.answers(asked) == engine(None).answers(asked)
        check(drafts)
    assert made.core.stats().prefix_hits > 2 * 30


def test_preempted_rows_are_drafted_for_as_before() -> None:
    asked = prompts(6, 16, seed=6)
    made = engine(num_blocks=28, rows=6, max_len=100)
    drafts = record(made)
    assert made.answers(asked) == engine(None).answers(asked)
    assert made.core.stats().preemptions > 0
    check(drafts)


@pytest.mark.parametrize(("block_size", "depth"), [(1, 1), (4, 2), (16, 2)])
def test_samples_by_seed_are_those_of_plain_decoding(block_size: int, depth: int) -> None:
    asked = prompts(6, 16, seed=7)
    sampling: dict[str, Any] = {"temperature": 1.0, "n": 2, "seed": 3, "repetition_penalty": 1.2}
    made = engine(block_size=block_size, num_blocks=128 // block_size, rows=6, max_len=100, depth=depth)
    assert made.answers(asked, **sampling) == engine(None).answers(asked, **sampling)
    assert made.core.stats().drafted_tokens > 0
    made.executor.worker.check()


def test_requests_that_end_early_leave_nothing_behind() -> None:
    made = engine(rows=6, num_blocks=64)
    for number, prompt in enumerate(prompts(6, 20, seed=8)):
        made.submit(f"r{number}", prompt, max_tokens=40, temperature=1.0)
    for _ in range(4):
        made.core.step()
    for number in range(0, 6, 2):
        made.core.abort(Abort(f"r{number}"))
    drafts = record(made)
    made.run()
    check(drafts)
    assert made.core.stats().blocks.used == 0
    made.executor.worker.check()


def test_a_head_that_knows_its_target_is_right_after_forks_prefix_hits_and_preemption() -> None:
    target, head = memoryless(TARGET), knowing_head(TARGET, LAYERS)
    asked = prompts(6, 24, seed=9)
    for num_blocks in (30, 128):
        made = engine(head, target, num_blocks=num_blocks, rows=6, max_len=100)
        wanted = engine(None, target).answers(asked, n=2)
        for _ in range(2):  # the second time a large pool has the prompts in the prefix cache
            assert made.answers(asked, n=2) == wanted
        stats = made.core.stats()
        assert stats.preemptions > 0 if num_blocks == 30 else stats.prefix_hits > 0
        assert stats.accepted_tokens == stats.drafted_tokens > 0


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8", "int8", "int4"])
def test_every_token_of_a_prompt_leaves_its_feature_whatever_the_cache_holds(kv_dtype: str) -> None:
    """What the first layer is given is the embedding."""
    head = random_head(head_config(CONFIG, (0,)))
    made, prompt = engine(head, kv_dtype=kv_dtype, budget=5, rows=2), prompts(1, 30, seed=12)[0]
    made.answers([prompt], max_tokens=1)
    features = made.executor.worker.drafter._features
    lines = features._lines[: features._spare].cpu()  # behind them: what rows of padding leave
    found = {tuple(line.tolist()) for line in lines[lines.any(dim=1)].round(decimals=3)}
    wanted = F.linear(TARGET.tensors["model.embed_tokens.weight"][prompt], head.tensors["fc.weight"])
    assert found == {tuple(line.tolist()) for line in wanted.round(decimals=3)}


def test_windows_of_the_target_change_nothing() -> None:
    config = replace(tiny_config("mistral", num_layers=4), windows=(8, 8, 8, 8))
    target = MemoryCheckpoint(config, TARGET.tensors)
    asked = prompts(4, 30, seed=10)
    made = engine(HEAD, target)
    assert made.answers(asked) == engine(None, target).answers(asked)
    assert made.core.stats().drafted_tokens > 0


def test_the_engine_itself_decides_when_a_head_that_is_never_right_rests() -> None:
    made = TinyEngine(TARGET, METHOD, draft=HEAD)
    asked = prompts(4, 20, seed=11)
    assert made.answers(asked, max_tokens=60) == engine(None).answers(asked, max_tokens=60)
