"""The worker over a tiny random model: rows, failures, logprobs, and the order of a plan."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.loading.weights import load_weights, randomize_weights
from quire.runtime.models.build import build_model
from quire.runtime.models.decoder import Decoder
from quire.types.errors import ModelLoadError
from quire.types.step import Chunk, StepPlan
from tiny_models import DEVICE, VOCAB, Bench, GreedySampler, MemoryCheckpoint, engine_config, tiny_config


@functools.cache
def checkpoint() -> MemoryCheckpoint:
    """Random weights under Hugging Face names, without transformers."""
    config = tiny_config(tie_word_embeddings=True, num_layers=2)
    heads, hidden, inner = config.heads, config.hidden_size, config.intermediate_size
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        path = f"model.layers.{layer}"
        shapes |= {
            f"{path}.input_layernorm.weight": (hidden,),
            f"{path}.post_attention_layernorm.weight": (hidden,),
            f"{path}.self_attn.q_proj.weight": (heads.query_size, hidden),
            f"{path}.self_attn.k_proj.weight": (heads.kv_size, hidden),
            f"{path}.self_attn.v_proj.weight": (heads.kv_size, hidden),
            f"{path}.self_attn.o_proj.weight": (hidden, heads.query_size),
            f"{path}.mlp.gate_proj.weight": (inner, hidden),
            f"{path}.mlp.up_proj.weight": (inner, hidden),
            f"{path}.mlp.down_proj.weight": (hidden, inner),
        }
    generator = torch.Generator().manual_seed(0)
    return MemoryCheckpoint(config, {name: torch.randn(s, generator=generator) * 0.2 for name, s in shapes.items()})


def bench(**options: object) -> Bench:
    sampler = options.pop("sampler", None)
    assert sampler is None or isinstance(sampler, GreedySampler)
    return Bench(checkpoint(), engine_config(**options), sampler=sampler)  # type: ignore[arg-type]


def alone(prompt: list[int], count: int) -> list[int]:
    """What the model says to one prompt with nobody beside it."""
    single = bench()
    single.add(0, prompt)
    single.run(chunks=[Chunk(0, 0, len(prompt), (0,))])
    for _ in range(count - 1):
        single.run(decode=[0])
    return single.tokens[0][len(prompt) :]


def test_sampled_tokens_come_back_in_the_order_of_the_plan() -> None:
    group = bench()
    prompts = {0: [5, 6, 7], 1: list(range(40)), 2: [9], 3: [11, 12]}
    for row in (0, 1, 2):
        group.add(row, prompts[row])
        group.run(chunks=[Chunk(row, 0, len(prompts[row]), (row,))])
    group.add(3, prompts[3])
    group.run(decode=[2, 1, 0], chunks=[Chunk(3, 0, 2, (3,))])
    for _ in range(3):
        group.run(decode=[3, 0, 2, 1])
    for row, prompt in prompts.items():
        answer = group.tokens[row][len(prompt) :]
        assert answer == alone(prompt, len(answer))


def test_only_the_row_whose_own_code_raises_fails() -> None:
    group = bench(sampler=GreedySampler(broken=[13]))
    group.add(0, [1, 2, 3])
    group.run(chunks=[Chunk(0, 0, 3, (0,))])
    group.add(1, [4, 5], seed=13)
    group.run(decode=[0], chunks=[Chunk(1, 0, 2, (1,))])
    assert [(failure.row, failure.reason) for failure in group.output.failures] == [(1, "seed: is broken")]
    group.run(decode=[1, 0])
    assert group.output.failures == ()
    group.release(1)
    group.add(1, [4, 5])
    group.run(decode=[0], chunks=[Chunk(1, 0, 2, (1,))])
    assert group.output.failures == ()
    assert group.tokens[0][3:] == alone([1, 2, 3], 4)
    assert group.tokens[1][2:] == alone([4, 5], 1)


def test_a_failed_row_is_still_computed_because_others_may_share_its_blocks() -> None:
    group = bench(sampler=GreedySampler(broken=[13]))
    group.add(1, [4, 5, 6, 7, 8], seed=13)
    group.run(chunks=[Chunk(1, 0, 5, (1,))])
    assert len(group.output.failures) == 1
    assert group.worker.rows.tokens[1, :5].tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_fails_only_its_row(token: int) -> None:
    group = bench()
    group.add(0, [1, 2, 3])
    group.add(1, [4, token, 5])
    group.run(chunks=[Chunk(0, 0, 3, (0,)), Chunk(1, 0, 3, (1,))])
    assert [failure.row for failure in group.output.failures] == [1]
    assert f"outside [0, {VOCAB})" in group.output.failures[0].reason
    assert group.tokens[0][3:] == alone([1, 2, 3], 1)


def test_prompt_logprobs_cover_every_prompt_token_but_the_first_however_it_is_chunked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
    found = []
    for cuts, at_once in (([10], 128), ([1, 4, 5], 128), ([7, 3], 2)):
        monkeypatch.setattr("quire.runtime.worker.prompt_logprobs.AT_ONCE", at_once)
        group = bench()
        group.add(0, prompt, prompt_logprobs=0)
        group.add(1, prompt[:4], prompt_logprobs=2)
        group.add(2, prompt[:5])
        start, lines = 0, {}
        for size in cuts:
            end = start + size
            others = [] if start else [Chunk(1, 0, 4, (1,)), Chunk(2, 0, 5, (2,))]
            group.run(chunks=[*others, Chunk(0, start, size, (0,) if end == 10 else ())])
            assert not group.prompt_tables(2)
            if not start:
                (other,) = group.prompt_tables(1)
            for table in group.prompt_tables(0):
                lines |= {place: line for place, line in enumerate(table.lines()) if line is not None}
            start = end
        assert sorted(lines) == list(range(1, 10))
        assert [lines[place][0] for place in range(1, 10)] == [[token] for token in prompt[1:]]
        found.append(np.array([lines[place][1][0] for place in range(1, 10)]))
        assert other.start == 1
        assert other.token_ids.reshape(3, 3)[:, 0].tolist() == prompt[1:4]
        np.testing.assert_allclose(other.logprobs.reshape(3, 3)[:, 0], found[-1][:3], atol=1e-5)
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    np.testing.assert_allclose(found[2], found[0], atol=1e-5)


@pytest.mark.parametrize(("count", "num_listed"), [(20, 20), (21, 21), (-1, VOCAB)])
def test_long_lists_of_prompt_logprobs_leave_the_device_slice_by_slice(
    monkeypatch: pytest.MonkeyPatch, count: int, num_listed: int
) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
    monkeypatch.setattr("quire.runtime.worker.prompt_logprobs.AT_ONCE", 4)
    group, plain = bench(), bench()
    group.add(0, prompt, prompt_logprobs=count)
    group.run(chunks=[Chunk(0, 0, 10, (0,))])
    plain.add(0, prompt, prompt_logprobs=0)
    plain.run(chunks=[Chunk(0, 0, 10, (0,))])
    held = group.output.prompt_logprobs.tensors  # on the device until the step ends
    assert bool(held) == (num_listed <= 20)
    (table,), (wanted,) = group.prompt_tables(0), plain.prompt_tables(0)
    assert table.ranks.tolist() == wanted.ranks.tolist()
    assert table.width == 1 + num_listed
    np.testing.assert_allclose(table.logprobs.reshape(9, -1)[:, 0], wanted.logprobs, atol=1e-5)


def test_prompt_logprobs_begin_at_the_requested_position() -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
    whole, late = bench(), bench()
    whole.add(0, prompt, prompt_logprobs=1)
    whole.run(chunks=[Chunk(0, 0, 10, (0,))])
    late.add(0, prompt, prompt_logprobs=1, prompt_logprobs_start=7)
    late.run(chunks=[Chunk(0, 0, 5)])
    assert not late.prompt_tables(0)
    late.run(chunks=[Chunk(0, 5, 5, (0,))])
    (all_of_them,), (few,) = whole.prompt_tables(0), late.prompt_tables(0)
    assert (few.start, few.ranks.tolist()) == (7, all_of_them.ranks.tolist()[6:])
    np.testing.assert_allclose(few.logprobs, all_of_them.logprobs[6 * 2 :], atol=1e-5)


def test_logits_are_computed_only_where_a_row_samples() -> None:
    group = bench()
    group.add(0, list(range(20)))
    assert group.run(chunks=[Chunk(0, 0, 12)]) == {}
    assert group.sampler.seen[0] == []
    group.run(chunks=[Chunk(0, 12, 8, (0,))])
    assert len(group.sampler.seen[0]) == 1


def test_a_plan_without_tokens_only_updates_rows() -> None:
    group = bench()
    group.add(0, [1, 2])
    assert group.run() == {}
    assert group.run(chunks=[Chunk(0, 0, 2, (0,))])[0] == alone([1, 2], 1)[0]


def test_a_negative_mark_from_the_sampler_becomes_a_failure_and_never_an_input() -> None:
    class Failing(GreedySampler):
        def sample(self, logits, samples, history):  # type: ignore[no-untyped-def]
            logits.fill_(float("nan"))
            sampled = super().sample(logits, samples, history)
            sampled.token_ids.fill_(-1)
            return sampled

    group = bench(sampler=Failing())
    group.add(0, [1, 2])
    group.run(chunks=[Chunk(0, 0, 2, (0,))])
    result = group.result
    assert result.token_ids.tolist() == [0]
    assert [failure.row for failure in result.failures] == [0]
    assert group.worker.rows.tokens[0, 2] == 0
    group.run(decode=[0])


def test_the_history_given_to_the_sampler_holds_what_was_sampled() -> None:
    group = bench()
    group.add(2, [7, 8, 9])
    group.run(chunks=[Chunk(2, 0, 3, (2,))])
    group.run(decode=[2])
    history = group.worker.rows.history
    assert history.tokens[2, :5].tolist() == group.tokens[2]
    assert int(history.lengths[2]) == 5
    assert int(history.num_prompt[2]) == 3


def test_a_row_full_to_its_last_token_still_decodes() -> None:
    group = bench(max_len=6)
    group.add(0, [1, 2, 3, 4])
    group.run(chunks=[Chunk(0, 0, 4, (0,))])
    for _ in range(2):
        group.run(decode=[0])
    assert len(group.tokens[0]) == 7


def test_half_precision_weights_run_on_any_cpu() -> None:
    group = Bench(checkpoint(), engine_config(dtype="bfloat16"))
    group.add(0, [1, 2, 3])
    group.run(chunks=[Chunk(0, 0, 3, (0,))])
    group.run(decode=[0])
    assert group.worker.cache.layers[0].key.dtype == torch.bfloat16
    wide = bench()
    wide.add(0, [1, 2, 3])
    wide.run(chunks=[Chunk(0, 0, 3, (0,))])
    torch.testing.assert_close(group.sampler.seen[0][0], wide.sampler.seen[0][0], rtol=0.05, atol=0.1)


def test_rows_may_be_released_and_reused_in_one_plan() -> None:
    group = bench(rows=1)
    for prompt in ([1, 2, 3], [4, 5, 6, 7, 8]):
        if group.tokens:
            group.release(0)
        group.add(0, prompt)
        group.run(chunks=[Chunk(0, 0, len(prompt), (0,))])
        group.run(decode=[0])
        assert group.tokens[0][len(prompt) :] == alone(prompt, 2)


def test_random_weights_are_repeatable_and_sane() -> None:
    config = tiny_config("qwen3", qkv_bias=True)
    outs = []
    for seed in (1, 1, 2):
        builder = LayerBuilder(engine_config().device, config.heads)
        model = build_model(config, builder)
        randomize_weights(model, seed)
        outs.append(model.logits(torch.ones(1, config.hidden_size, device=DEVICE)))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert outs[0].isfinite().all()


def _load(tensors: dict[str, torch.Tensor]) -> Decoder:
    config = checkpoint().config
    model = build_model(config, LayerBuilder(engine_config().device, config.heads))
    load_weights(model, MemoryCheckpoint(config, tensors, file="weights.bin"))
    return model


def test_loading_reports_progress_and_reads_each_tensor_once() -> None:
    source = MemoryCheckpoint(checkpoint().config, checkpoint().tensors)
    model = build_model(source.config, LayerBuilder(engine_config().device, source.config.heads))
    seen: list[tuple[str, int, int]] = []
    load_weights(model, source, progress=lambda *now: seen.append(now))
    total = len(source.tensors)
    assert [now[1] for now in seen] == list(range(1, total + 1))
    assert all(now[2] == total for now in seen)
    assert sorted(source.reads) == sorted(source.tensors)


def test_a_missing_tensor_is_named() -> None:
    tensors = dict(checkpoint().tensors)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelLoadError, match=r"weights.bin: model.layers.1.mlp.up_proj.weight: is missing"):
        _load(tensors)


def test_an_unexpected_tensor_is_named() -> None:
    tensors = checkpoint().tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}
    with pytest.raises(ModelLoadError, match=r"q_proj.bias: has no place in this model"):
        _load(tensors)


def test_a_tensor_of_a_wrong_shape_is_named_with_both_shapes() -> None:
    tensors = checkpoint().tensors | {"model.norm.weight": torch.zeros(47)}
    with pytest.raises(ModelLoadError, match=r"model.norm.weight: has shape \[47\], the config asks for \[48\]"):
        _load(tensors)


def test_stored_rotary_buffers_and_a_head_equal_to_the_tied_embedding_are_harmless() -> None:
    embedding = checkpoint().tensors["model.embed_tokens.weight"]
    extra = {"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    hidden = torch.ones(1, 48, device=DEVICE)
    assert torch.equal(_load(checkpoint().tensors | extra).logits(hidden), _load(checkpoint().tensors).logits(hidden))


def test_a_head_unlike_the_tied_embedding_is_refused() -> None:
    embedding = checkpoint().tensors["model.embed_tokens.weight"]
    with pytest.raises(ModelLoadError, match=r"lm_head.weight: differs from the embedding"):
        _load(checkpoint().tensors | {"lm_head.weight": embedding + 1})


def test_plans_may_hold_numpy_integers() -> None:
    group = bench()
    group.add(0, [1, 2])
    group.run(chunks=[Chunk(0, 0, 2, (0,))])
    group.worker.execute(StepPlan(step=9, decode_rows=np.array([0], dtype=np.int32)))
    assert group.worker.rows.lengths[0] == 4
