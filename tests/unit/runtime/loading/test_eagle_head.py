"""EAGLE-3 heads as people publish them: recognised by config.json alone, loaded, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle_heads import head_config, random_head
from quire.config.arguments import EngineArguments
from quire.config.model import EagleHead, ModelConfig
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import ModelFiles
from quire.runtime.loading.model_config import read_model_config
from quire.serving.assembly import plan_engine, plan_model
from quire.types.errors import ConfigError, ModelLoadError
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from tiny_models import MemoryCheckpoint, random_checkpoint, tiny_config

TARGET = random_checkpoint(tiny_config(num_layers=8))
HEAD = random_head(head_config(TARGET.config, (), drafted=40))


def numbers(config: ModelConfig) -> dict[str, Any]:
    heads = config.heads
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads.num_query,
        "num_key_value_heads": heads.num_kv,
        "head_dim": heads.dim,
        "max_position_embeddings": 2_048,
        "rms_norm_eps": config.norm_eps,
        "torch_dtype": "float32",
    }


PLAIN = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40, **numbers(HEAD.config)}
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 40,
    "torch_dtype": "float32",
    "transformer_layer_config": {"model_type": "llama", **numbers(HEAD.config)},
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> ModelFiles:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return ModelFiles(folder.name, folder, "hf")


def published(head: MemoryCheckpoint, layer: str = "midlayer") -> dict[str, torch.Tensor]:
    """Its tensors under the names that they have in files, with those that are not read."""
    tensors = {name.replace("layers.0.", f"{layer}."): tensor for name, tensor in head.tensors.items()}
    model = head.config
    return tensors | {
        "t2d": torch.zeros(model.vocab_size, dtype=torch.bool),
        "embed_tokens.weight": torch.ones(model.vocab_size, model.hidden_size),
    }


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(ModelFiles("head", folder, "hf"))


def test_heads_are_recognised_by_config_alone(tmp_path: Path) -> None:
    old = {**PLAIN, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    for given in (PLAIN, old, {**PLAIN, "architectures": ["Eagle3LlamaForCausalLM"]}):
        found = read(tmp_path, given)
        assert (found.architecture, found.eagle) == ("eagle3", EagleHead(40))
        assert replace(found, rope=HEAD.config.rope) == HEAD.config
    found = read(tmp_path, SPECULATORS)
    assert (found.eagle, found.heads) == (EagleHead(40, norms_stream=True), HEAD.config.heads)
    plain = {key: value for key, value in old.items() if key != "draft_vocab_size"}
    assert read(tmp_path, plain).architecture == "llama"


def test_the_layers_that_a_head_reads_are_counted_by_where_config_json_has_them(tmp_path: Path) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    for given in ({key: [2, 3, 4]}, {"eagle_config": {key: [1, 2, 3], "use_aux_hidden_state": True}}):
        eagle = read(tmp_path, PLAIN | given).eagle
        assert eagle is not None
        assert eagle.layers == (2, 3, 4)


def test_the_norms_that_published_heads_name_are_known(tmp_path: Path) -> None:
    norms = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    assert read(tmp_path, PLAIN | {"eagle_config": {**norms, "norm_before_fc": False}}).eagle == EagleHead(40)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: an EAGLE-3 head has 1, is 2"),
        ({"draft_vocab_size": 98}, r"draft_vocab_size: must be in \[1, 97\], is 98"),
        ({"target_hidden_size": 64}, "target_hidden_size: must be hidden_size=48, is 64"),
        ({"norm_before_fc": True}, "norm_before_fc: only false is supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config: only heads"),
        ({"eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc: only false is supported"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm: only false is supported"),
        ({"eagle_config": {"use_last_layernorm": False}}, "eagle_config.use_last_layernorm: only true is supported"),
        ({"use_input_layernorm_in_first_layer": False}, "use_input_layernorm_in_first_layer: only true is supported"),
        ({"eagle_config": {"norm_before_residual": True}}, "eagle_config.norm_before_residual: is not known here"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 2]}, "rising order"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "one or more layers"),
    ],
)
def test_configs_that_cannot_be_obeyed_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read(tmp_path, PLAIN | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d2t": torch.full((40,), 90)}, "d2t: must map to distinct tokens of a vocabulary of 97"),
        ({"d2t": torch.zeros(40)}, "d2t: has dtype F32; weights may be I64, I32"),
        ({"d2t": None}, "d2t: is missing"),
        ({"fc.weight": torch.zeros(48, 96)}, r"fc.weight: has shape \(48, 96\), the config says \(48, 144\)"),
        ({"midlayer.self_attn.q_proj.weight": torch.ones(64, 48)}, r"the config says \(64, 96\)"),
        ({"input_norm.weight": torch.ones(144)}, "input_norm.weight: has no place in a eagle3 model"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], words: str
) -> None:
    tensors = {name: tensor for name, tensor in (published(HEAD) | changes).items() if tensor is not None}
    head = write(tmp_path / "head", PLAIN, tensors)
    with pytest.raises(ModelLoadError, match=words):
        answers(tmp_path, head)


def answers(folder: Path, head: ModelFiles | None, **settings: Any) -> tuple[list[int], int]:
    """What an engine made of files says after three tokens, and how many tokens it drafted."""
    config = {"architectures": ["LlamaForCausalLM"], **numbers(TARGET.config)}
    target = write(folder / "target", config, TARGET.tensors)
    speculative = None if head is None else {"model": str(head.path), "num_speculative_tokens": 3}
    arguments = EngineArguments(
        dtype="float32", threads=2, kv_cache_memory="4MiB", max_model_len=256, speculative_config=speculative,
        **settings,
    )  # fmt: skip
    core = plan_engine(target, arguments).build("auto", lambda *_: None)
    try:
        core.submit(Submit("a", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=20), TokenRules()))
        found: list[int] = []
        while core.has_work:
            found += core.step().token_ids.tolist()
        return found, core.stats().drafted_tokens
    finally:
        core.close()


@pytest.mark.parametrize(("config", "layer"), [(PLAIN, "midlayer"), (SPECULATORS, "layers.0")])
def test_an_engine_drafts_with_a_head_from_files_and_says_the_same(
    tmp_path: Path, config: dict[str, Any], layer: str
) -> None:
    head = write(tmp_path / "head", config, published(HEAD, layer))
    checkpoint = open_checkpoint(head)
    assert not {"t2d", "embed_tokens.weight"} & checkpoint.names
    checkpoint.close()
    plain, _ = answers(tmp_path, None)
    drafted, num_drafted = answers(tmp_path, head)
    assert drafted == plain
    assert num_drafted > 0


def test_ranks_and_stages_that_are_processes_load_their_parts_of_a_head(tmp_path: Path) -> None:
    head = write(tmp_path / "head", PLAIN, published(HEAD))
    drafted, num_drafted = answers(tmp_path, head, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert drafted == answers(tmp_path, None)[0]
    assert num_drafted > 0


def test_a_head_is_no_model_by_itself(tmp_path: Path) -> None:
    head = write(tmp_path / "head", PLAIN, published(HEAD))
    for plan in (plan_engine, plan_model):
        with pytest.raises(ConfigError, match=r"EAGLE head.*name the head in speculative_config"):
            plan(head, EngineArguments())
