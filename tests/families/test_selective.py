"""Mamba, FalconMamba and Jamba: settings beside those of the table, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from family_bench import change_config, check_parity, hf_checkpoint, hf_model, load_bench, num_calls
from gguf_families import LAYOUTS, family_metadata, family_tensors, gguf_case
from gguf_files import write_gguf
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import ModelLoadError
from tiny_models import VOCAB

transformers = pytest.importorskip("transformers")
PURE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
HYBRID: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8,
}  # fmt: skip
CONFIGS = {
    "mamba": lambda **changes: transformers.MambaConfig(**(PURE | changes)),
    "falcon_mamba": lambda **changes: transformers.FalconMambaConfig(**(PURE | changes)),
    "jamba": lambda **changes: transformers.JambaConfig(**(HYBRID | changes)),
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mamba", {"use_conv_bias": False, "expand": 3, "tie_word_embeddings": False}),
        ("mamba", {"use_bias": True, "conv_kernel": 2}),
        ("falcon_mamba", {"mixer_rms_eps": 0.1}),
        ("jamba", {"num_experts": 1}),
        ("jamba", {"mamba_conv_bias": False, "expert_layer_period": 3, "expert_layer_offset": 0, "mamba_expand": 1}),
    ],
)
def test_settings(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model(CONFIGS[name](**changes))
    model.save_pretrained(tmp_path)
    check_parity(tmp_path, attention="auto", model=model)


def test_the_rank_of_step_sizes_is_a_sixteenth_of_the_hidden_size(tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, CONFIGS["mamba"]()), time_step_rank="auto")
    recurrent = open_checkpoint(files_at(tmp_path)).config.recurrent
    assert recurrent is not None
    assert recurrent.selective is not None
    assert recurrent.selective.rank == 2


def test_a_model_without_attention_keeps_states_and_the_blocks_that_name_its_tokens(tmp_path: Path) -> None:
    config = open_checkpoint(files_at(hf_checkpoint(tmp_path, CONFIGS["mamba"]()))).config
    assert [spec.kind for spec in config.kv_specs] == ["state", "state", "full"]
    assert config.kv_specs[0].state_bytes == 4 * (64 * 8 + 3 * 64)
    assert config.kv_specs[2].numbers == 32


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_called_in_python(name: str, tmp_path: Path) -> None:
    hf_checkpoint(tmp_path, CONFIGS[name]())
    assert num_calls(load_bench(tmp_path)) == 0


def test_gguf_files_of_falcon_mamba_say_that_step_sizes_are_normed(tmp_path: Path) -> None:
    case, layout = gguf_case("mamba", tmp_path), LAYOUTS["mamba"]
    metadata = family_metadata(layout, case) | {"mamba.ssm.dt_b_c_rms": True}
    path = write_gguf(tmp_path / "m.gguf", metadata, family_tensors(layout, case, "F32"))
    recurrent = open_checkpoint(files_at(path)).config.recurrent
    assert recurrent is not None
    assert recurrent.selective is not None
    assert recurrent.selective.norm_eps == 1e-6


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mamba", "hidden_act", "gelu"),
        ("mamba", "intermediate_size", 65),
        ("mamba", "conv_kernel", 9),
        ("mamba", "state_size", 257),
        ("falcon_mamba", "time_step_rank", 0),
        ("jamba", "attn_layer_offset", 2),
        ("jamba", "attn_layer_period", 1),
        ("jamba", "expert_layer_offset", 2),
        ("jamba", "num_experts_per_tok", 5),
        ("jamba", "sliding_window", 8),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, name: str, key: str, value: object) -> None:
    change_config(hf_checkpoint(tmp_path, CONFIGS[name]()), **{key: value})
    with pytest.raises(ModelLoadError, match=key.removesuffix("_period")):
        open_checkpoint(files_at(tmp_path))
