from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.config.arguments import EngineArguments
from quire.config.memory import kv_block_bytes, plan_memory
from quire.config.model import EagleHead, Heads, Latent, ModelConfig
from quire.config.resolve import resolve_engine_config
from quire.config.speculation import read_speculation, resolve_speculation
from quire.config.stages import stage_models
from quire.types.errors import ConfigError
from tests.unit.config.machines import LAPTOP, SERVER, SMALL


def test_nothing_asked_for_is_nothing_guessed() -> None:
    assert read_speculation(None) is None
    assert resolve_engine_config(EngineArguments(), LAPTOP, SMALL)[0].speculation is None


def test_a_method_is_enough_and_the_rest_has_defaults() -> None:
    ngram = read_speculation({"method": "ngram"})
    assert ngram is not None
    assert (ngram.num_tokens, ngram.lookup_min, ngram.lookup_max) == (16, 2, 4)
    drafts = read_speculation({"model": "small"})  # a model without a method is a draft model, as in vLLM
    assert drafts is not None
    assert (drafts.method, drafts.model, drafts.num_tokens) == ("draft_model", "small", 5)
    layers = read_speculation({"method": "self_draft"})
    assert layers is not None
    assert resolve_speculation(layers, SMALL, None).num_layers == SMALL.num_layers // 3


def test_vllms_names_are_understood() -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 6, "prompt_lookup_min": 3}
    found = read_speculation(asked)
    assert found is not None
    assert (found.num_tokens, found.lookup_min, found.lookup_max) == (7, 3, 6)
    one = read_speculation({"method": "ngram", "prompt_lookup_max": 1})
    assert one is not None
    assert (one.lookup_min, one.lookup_max) == (1, 1)


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ("ngram", "speculative_config", "object"),
        ({}, "speculative_config.method", "missing"),
        ({"method": "eagle"}, "speculative_config.method", "ngram"),
        ({"method": "ngram", "model": "x"}, "speculative_config.model", "no meaning"),
        ({"method": "ngram", "tokens": 3}, "speculative_config.tokens", "unknown"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "speculative_config.num_speculative_tokens", "64"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "speculative_config.num_speculative_tokens", "64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "speculative_config.num_speculative_tokens", "whole"),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "speculative_config.prompt_lookup_min",
            "above",
        ),
        ({"method": "draft_model"}, "speculative_config.model", "missing"),
        ({"method": "draft_model", "model": 3}, "speculative_config.model", "name"),
        ({"method": "self_draft", "num_layers": 0}, "speculative_config.num_layers", "whole"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(asked: Any, field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        resolve_engine_config(EngineArguments(speculative_config=asked), LAPTOP, SMALL)
    assert refused.value.setting == field


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    asked = EngineArguments(speculative_config={"model": "other"})
    with pytest.raises(ConfigError, match=r"vocabulary.*same family"):
        resolve_engine_config(asked, LAPTOP, SMALL, replace(SMALL, vocab_size=SMALL.vocab_size + 1))


def test_drafting_by_all_layers_is_refused() -> None:
    asked = EngineArguments(speculative_config={"method": "self_draft", "num_layers": SMALL.num_layers})
    with pytest.raises(ConfigError, match="below the model's"):
        resolve_engine_config(asked, LAPTOP, SMALL)


def test_the_memory_plan_counts_a_draft_model_its_blocks_and_its_rows() -> None:
    draft = replace(SMALL, num_layers=2)
    plain = resolve_engine_config(EngineArguments(num_kv_blocks=500), SERVER, SMALL)[1]
    asked = EngineArguments(num_kv_blocks=500, speculative_config={"model": "draft"})
    config, plan = resolve_engine_config(asked, SERVER, SMALL, draft)
    assert config.speculation is not None
    assert config.speculation.draft == draft
    assert plan.block_bytes == plain.block_bytes + kv_block_bytes(draft, config.device.kv_dtype, 16)
    assert plan.total >= plain.total + 2 * draft.num_parameters + plan.rows
    assert "drafting" in str(plan)
    assert "drafting" not in str(plain)
    looked_up = resolve_engine_config(
        EngineArguments(num_kv_blocks=500, speculative_config={"method": "ngram"}), SERVER, SMALL
    )[1]
    assert looked_up == plain


HEAD = replace(
    SMALL,
    architecture="eagle3",
    num_layers=1,
    per_layer_input=SMALL.hidden_size,
    eagle=EagleHead(SMALL.vocab_size // 4),
)


def with_head(head: ModelConfig = HEAD, target: ModelConfig = SMALL, **settings: Any) -> Any:
    method = settings.pop("method", None)
    asked = {"model": "head"} | ({} if method is None else {"method": method})
    return resolve_engine_config(EngineArguments(speculative_config=asked, **settings), LAPTOP, target, head)


def test_with_stages_the_memory_plan_counts_a_draft_model_on_the_last_one() -> None:
    asked = EngineArguments(pipeline_parallel_size=2, speculative_config={"model": "draft"})
    for layers, first in ((SMALL.num_layers, SMALL.num_layers - 1), (2, SMALL.num_layers)):
        draft = replace(SMALL, num_layers=layers)
        config, plan = resolve_engine_config(asked, LAPTOP, replace(SMALL, num_layers=first), draft)
        stages = stage_models(replace(SMALL, num_layers=first), 2, draft)
        plans = [plan_memory(stage, config, LAPTOP, LAPTOP.available_memory // 2) for stage in stages]
        own = [kv_block_bytes(stage, config.device.kv_dtype, 16) for stage in stages]
        drafted = kv_block_bytes(draft, config.device.kv_dtype, 16)
        assert [each.block_bytes for each in plans] == [own[0], own[1] + drafted]
        assert ["drafting" in str(each) for each in plans] == [False, True]
        assert plan.total == max(each.total for each in plans)
        without = replace(asked, speculative_config=None)
        whole, _ = resolve_engine_config(without, LAPTOP, replace(SMALL, num_layers=first))
        assert config.cache.num_blocks < whole.cache.num_blocks


@pytest.mark.parametrize("method", [None, "draft_model", "eagle3"])
def test_a_head_makes_the_method_and_reads_three_layers_of_the_model(method: str | None) -> None:
    found = with_head(method=method)[0].speculation
    assert found is not None
    assert found.method == "eagle3"
    assert found.draft is not None
    assert found.draft.eagle is not None
    count = SMALL.num_layers
    assert found.draft.eagle.layers == (2, count // 2, count - 3)


def test_a_head_has_a_vector_of_every_token_in_the_plan() -> None:
    _, plain = resolve_engine_config(EngineArguments(kv_cache_memory="64MiB"), LAPTOP, SMALL)
    config, plan = with_head(kv_cache_memory="64MiB")
    size, kv_dtype = config.cache.block_size, config.device.kv_dtype
    vector = 4 * HEAD.hidden_size  # float32
    assert config.device.dtype == "float32"
    assert plan.block_bytes == plain.block_bytes + kv_block_bytes(HEAD, kv_dtype, size) + size * vector


@pytest.mark.parametrize(
    ("head", "target", "words"),
    [
        (replace(HEAD, hidden_size=64), SMALL, "64 numbers in a hidden state, the model has"),
        (replace(HEAD, vocab_size=100), SMALL, "100 tokens in its vocabulary, the model has"),
        (replace(HEAD, eagle=EagleHead(9, (2, 9_999))), SMALL, "reads what layers 2, 9999 are given"),
        (HEAD, replace(SMALL, num_layers=5), r"layers 2, 2, 2 are given, and the model has 5 layers.*trained for this"),
        (HEAD, replace(SMALL, latent=Latent(8, 8, 8, 8)), "attention over latents"),
        (HEAD, replace(SMALL, local_heads=Heads(2, 2, 8)), "two kinds of heads"),
        (HEAD, replace(SMALL, embedding_scale=8.0), "scaled embeddings"),
    ],
)
def test_a_head_that_does_not_fit_the_model_is_refused(head: ModelConfig, target: ModelConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        with_head(head, target)
    assert refused.value.setting == "speculative_config.model"


def test_stages_have_memory_for_the_hidden_states_that_they_send() -> None:
    config, _ = with_head(pipeline_parallel_size=2)
    assert config.speculation is not None
    stages = stage_models(SMALL, 2, config.speculation.draft)
    assert [stage.head_layers for stage in stages] == [(2, SMALL.num_layers // 2, SMALL.num_layers - 3)] * 2
    first, last = (plan_memory(stage, config, LAPTOP, LAPTOP.available_memory // 2) for stage in stages)
    sent = 2 * 3 * config.scheduler.max_num_batched_tokens * 4 * SMALL.hidden_size  # received and sent, in float32
    assert first.draft == sent
    assert last.draft > sent + 4 * HEAD.num_parameters


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host_cache_memory": "64MiB"}, "tiers behind the device"),
        ({"kv_layout": "virtual", "block_size": 64}, "kv_layout is 'virtual'"),
    ],
)
def test_settings_that_leave_no_hidden_states_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_head(**settings)


def test_a_whole_model_is_no_head() -> None:
    with pytest.raises(ConfigError, match=r"not describe an EAGLE-3 head.*draft_model"):
        with_head(SMALL, method="eagle3")
