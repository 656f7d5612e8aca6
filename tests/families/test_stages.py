"""Every family over a pipeline of two and three stages: the tokens are those of transformers, or the settings are
refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapter_files import SMALL, make_adapter, merged
from family_bench import BACKENDS
from family_models import CONFIGS, NUM_TOKENS, FamilyCase
from interpreter import HAS_TRITON
from quire.config.stages import stage_models
from quire.types.errors import ConfigError
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from tests.families.features import engine, prompts_of
from tiny_models import DEVICE, greedy_reference
from worker_executor import TinyEngine

pytest.importorskip("transformers")
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
HYBRID = {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, FULL]}
CHANGES: dict[str, dict[str, Any]] = {  # so that two stages have what they need
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2},  # windows have own blocks
    "gemma3n_text": {"num_kv_shared_layers": 0},  # with several streams
    "gemma4_text": {"num_kv_shared_layers": 0},  # with inputs of each layer beside the stream
    "gemma4_text-moe": {"layer_types": [SLIDING, FULL, FULL, SLIDING, FULL]},
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "full"]},
    "granitemoehybrid": HYBRID,
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [0, 2]},
    "nemotron_h": {"hybrid_override_pattern": "M**-"},
    "nemotron_h-moe": {"hybrid_override_pattern": "ME*E*"},
    "recurrent_gemma": {"num_hidden_layers": 4, "block_types": ["recurrent", "attention"]},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", FULL] * 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": [FULL, "conv"] * 2},
    "qwen3_next": HYBRID,
    "olmo_hybrid": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
}
WITH_IMAGES = (
    "cohere2_vision", "glm4v", "glm4v_moe", "idefics3", "internvl", "llava", "llava_next", "llava_onevision",
    "mistral3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip


def check(case: FamilyCase, made: TinyEngine, prompts: list[list[int]], count: int = NUM_TOKENS) -> None:
    try:
        found = made.answers(prompts, max_tokens=count)
        made.executor.check()
    finally:
        made.executor.close()
    assert found == [[case.expected(prompt)[:count]] for prompt in prompts]


@pytest.mark.parametrize("name", sorted({*CONFIGS, "gemma4_text-moe", "nemotron_h-moe"} - set(WITH_IMAGES)))
def test_two_stages_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    case = FamilyCase(name, tmp_path, CHANGES.get(name, {}))
    made = engine(case, stages=2, budget=9)
    assert [len(worker._runner._model.blocks.own) for worker in made.executor.workers] in (
        [2, 1],
        [2, 2],
        [3, 3],
        [3, 2],
    )
    check(case, made, prompts_of(case))


def test_a_stage_does_not_begin_with_a_layer_that_reads_the_choice_of_another(tmp_path: Path) -> None:
    case = FamilyCase("glm_moe_dsa", tmp_path, {"indexer_types": ["full", "full", "shared"]})
    with pytest.raises(ConfigError, match="pipeline_parallel_size: is 2: layer 2 reads the tokens"):
        engine(case, stages=2, budget=9)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt2", "llama", "mixtral", "opt", "qwen2"])
def test_three_stages_give_them_too(name: str, tmp_path: Path) -> None:
    """A tied head, learned positions, a layer each."""
    case = FamilyCase(name, tmp_path)
    check(case, engine(case, stages=3, budget=7), prompts_of(case))


@pytest.mark.parametrize("attention", BACKENDS)
def test_every_backend_runs_stages(attention: str, tmp_path: Path) -> None:
    case = FamilyCase("gemma3_text", tmp_path, CHANGES["gemma3_text"])
    made = engine(case, stages=2, attention=attention, rows=2, max_len=32)
    check(case, made, [case.prompt(11), case.prompt(3, 1)], count=3)


@pytest.mark.skipif(not HAS_TRITON or DEVICE != "cpu", reason="needs Triton's interpreter")
def test_stages_whose_layers_have_inputs_beside_the_stream_are_prepared(tmp_path: Path) -> None:
    case = FamilyCase("gemma4_text", tmp_path, CHANGES["gemma4_text"])
    made = engine(case, stages=2, attention="triton", rows=2, max_len=32, block_size=16, budget=16)
    for worker in made.executor.workers:
        worker.prepare(0.0)  # also a step of more tokens than any graph has
        assert not worker.prepare_more()  # stages would do different things
    made.executor.close()


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
@pytest.mark.parametrize("name", ["gemma4_text", "qwen3_next"])
def test_graphs_of_stages_hand_on_what_is_beside_the_stream_and_move_states(name: str, tmp_path: Path) -> None:
    case = FamilyCase(name, tmp_path, CHANGES[name])
    made = engine(case, stages=2, attention="triton", rows=2, max_len=32, block_size=16)
    check(case, made, [case.prompt(5), case.prompt(3, 1)], count=3)


def test_windows_have_blocks_of_their_own_on_every_stage_or_on_none(tmp_path: Path) -> None:
    case = FamilyCase("gemma3_text", tmp_path, CHANGES["gemma3_text"])
    made = engine(case, stages=2)
    assert made.config.cache.groups.window == 9
    planes = [worker.cache.blocks.shape[0] // 2 for worker in made.executor.workers]
    assert planes == [1, 1]  # of the one layer that sees all; two window blocks hold the two others
    made.executor.close()
    uneven = engine(case, stages=3)
    assert uneven.config.cache.groups.window is None
    check(case, uneven, prompts_of(case))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_stages_add_the_changes_of_adapters(name: str, tmp_path: Path) -> None:
    case = FamilyCase(name, tmp_path / "model")
    folder = make_adapter(tmp_path / "adapter", case.model, seed=1)
    made = engine(case, stages=2, adapters=SMALL)
    prompt, params = case.prompt(11), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    made.core.adapters.load("mine", str(folder))
    made.core.submit(Submit("plain", tuple(prompt), params, TokenRules()))
    made.core.submit(Submit("adapted", tuple(prompt), params, TokenRules(), adapter="mine"))
    made.run()
    made.executor.close()
    wanted, _ = greedy_reference(merged(case.model, folder), prompt, NUM_TOKENS)
    found = {name: list(message.samples[0].token_ids) for name, message in made.finished.items()}
    assert found == {"plain": case.expected(prompt), "adapted": wanted}
    assert wanted != case.expected(prompt)


@pytest.mark.parametrize(
    ("name", "num_stages", "reason"),
    [
        ("gemma4_text", 2, "layer 5 reads the keys of layer 2"),
        ("gemma4_text-moe", 2, "layers 3 to 4, of stage 1, are all of one kind"),
        ("qwen3_next", 2, "layers 2 to 2, of stage 1, are all recurrent"),
        ("qwen3_vl", 2, "2 layers add vectors of images, and the first stage has too few"),
        ("llama", 4, "the model has 3 layers"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(name: str, num_stages: int, reason: str, tmp_path: Path) -> None:
    config = FamilyCase(name, tmp_path).checkpoint().config
    with pytest.raises(ConfigError, match=reason) as refusal:
        stage_models(config, num_stages)
    assert refusal.value.setting == "pipeline_parallel_size"
