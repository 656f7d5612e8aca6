"""DeepSeek, Qwen3-Next and Qwen3.5 in GGUF: the same numbers as in the folders that the files were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from family_bench import load_bench, logits_of
from family_models import FamilyCase
from gguf_exports import export_gguf, gguf_tensors, quantized_as
from gguf_files import TYPE_NUMBERS
from promises import tolerance
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.gguf.rearranged import reorder_columns
from quire.runtime.models.build import count_copies
from quire.runtime.quantization.levels import LevelWeight
from quire.runtime.quantization.region import Region
from quire.types.errors import ModelLoadError

pytest.importorskip("transformers")
LINEAR, FULL = "linear_attention", "full_attention"
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 lite": ("deepseek_v2", {"topk_method": "greedy", "rope_parameters": YARN}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN}),
    "qwen3_next": ("qwen3_next", {"layer_types": [LINEAR, LINEAR, FULL]}),
    "qwen3_5_text": ("qwen3_5_text", {"linear_num_value_heads": 6, "linear_value_head_dim": 32}),
    "qwen3_5_text evenly": ("qwen3_5_text", {}),  # as many value heads as key heads
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {"layer_types": [LINEAR, LINEAR, FULL]}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, (family, changes) in MODELS.items():
        found[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
        model = FamilyCase(family, found[name], changes).model
        generator = torch.Generator().manual_seed(7)
        for buffer, value in model.named_buffers():
            if buffer.endswith("e_score_correction_bias"):
                value.normal_(0.0, 0.5, generator=generator)
        model.save_pretrained(found[name])  # type: ignore[operator]
    return found


def check_same(path: Path, folder: Path, **settings: Any) -> None:
    """Two engines of one model. The state of a recurrent layer sums what each token adds to it."""
    near = tolerance(cpu=1e-5, gpu=1e-4)
    wanted = logits_of(folder, cpu_weights="float", **settings)
    for (tokens, logits), (right, expected) in zip(
        logits_of(path, cpu_weights="float", **settings), wanted, strict=True
    ):
        assert tokens == right
        torch.testing.assert_close(logits, expected, rtol=near, atol=near)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_what_its_folder_gives(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    check_same(export_gguf(folders[name], tmp_path / "m.gguf"), folders[name])


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "qwen3_next"])
def test_so_does_a_file_in_the_first_layout_of_its_family(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    check_same(export_gguf(folders[name], tmp_path / "m.gguf", old=True), folders[name])


@pytest.mark.parametrize(
    ("name", "old"), [*((name, False) for name in MODELS), ("deepseek_v3", True), ("qwen3_next", True)]
)
def test_quantized_tensors_are_those_of_the_folder_and_stay_as_stored(
    name: str, old: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(files_at(export_gguf(folders[name], tmp_path / "m.gguf", "Q8_0", old=old)))
    whole = open_checkpoint(files_at(export_gguf(folders[name], tmp_path / "p.gguf", old=old)))
    levels, held = 0, count_copies(checkpoint.config)
    for each in checkpoint.names:
        values, expected = checkpoint.read(each), whole.read(each)
        torch.testing.assert_close(values, expected, rtol=0, atol=float(expected.abs().max()) / 200)
        quantized = checkpoint.read_quantized(each)
        if quantized is None:
            continue
        levels += values.numel() if each in held else 0
        assert torch.equal(quantized.values(), values)
        outputs, inputs = values.shape
        region = Region(range(outputs // 3, outputs), range(32, inputs) if inputs > 32 else range(inputs))
        part = checkpoint.read_quantized(each, region)
        assert part is not None
        found = part.values()
        if part.shape != values.shape:
            assert torch.equal(found, values[outputs // 3 :, region.inputs.start :])
    assert levels == checkpoint.config.levels.parameters  # what the memory plan takes for quantized


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_quantized_files_run_as_their_numbers_do(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    path = export_gguf(folders[name], tmp_path / "m.gguf", "Q8_0")
    numbers = {each: rounded(each, value) for each, value in gguf_tensors(folders[name]).items()}
    plain = export_gguf(folders[name], tmp_path / "p.gguf", tensors=numbers)
    check_same(path, plain, dtype="float32")


def rounded(name: str, values: np.ndarray) -> np.ndarray:
    """The numbers that a file of Q8_0 has."""
    written = quantized_as(name, values, "Q8_0")
    if written.type_number != TYPE_NUMBERS["Q8_0"]:
        return values
    blocks = np.frombuffer(written.data, np.uint8).reshape(-1, 34)
    scales, levels = blocks[:, :2].copy().view(np.float16), blocks[:, 2:].copy().view(np.int8)
    return (levels.astype(np.float32) * scales.astype(np.float32)).reshape(values.shape)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_text"])
def test_layers_that_draft_are_left_out(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    count = open_checkpoint(files_at(folders[name])).config.num_layers
    more = {
        f"blk.{count}.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
        f"blk.{count}.attn_q.weight": np.ones((64, 64), np.float32),
    }
    settings = {"block_count": count + 1, "nextn_predict_layers": 1}
    path = export_gguf(folders[name], tmp_path / "m.gguf", "Q8_0", settings=settings, tensors=more)
    plain = export_gguf(folders[name], tmp_path / "p.gguf", "Q8_0")
    check_same(path, plain)
    assert open_checkpoint(files_at(path)).config == open_checkpoint(files_at(plain)).config


def test_a_gate_of_one_row_may_be_a_vector(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwen3_next"]
    gates = {name: value for name, value in gguf_tensors(folder).items() if "inp_shexp" in name}
    vectors = {name: value.reshape(-1) for name, value in gates.items()}
    check_same(export_gguf(folder, tmp_path / "m.gguf", tensors=vectors), folder)


def test_a_file_may_list_its_recurrent_layers(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = {"attention.recurrent_layers": [True, True, False], "full_attention_interval": None}
    folder = folders["qwen3_5_text"]
    check_same(export_gguf(folder, tmp_path / "m.gguf", settings=settings), folder)


def test_experts_of_a_layer_may_have_gate_and_up_in_one_tensor(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, path = folders["qwen3_5_moe_text"], tmp_path / "m.gguf"
    tensors = gguf_tensors(folder)
    gates = {name: value for name, value in tensors.items() if "ffn_gate_exps" in name}
    fused = {
        name.replace("gate", "gate_up"): np.concatenate((gate, tensors[name.replace("gate", "up")]), axis=1)
        for name, gate in gates.items()
    }
    dropped = [*gates, *(name.replace("gate", "up") for name in gates)]
    check_same(export_gguf(folder, path, tensors=fused, without=dropped), folder)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("deepseek_v2", {"expert_weights_norm": True}, "expert_weights_norm"),
        ("deepseek_v2", {"expert_gating_func": 3}, "expert_gating_func"),
        ("deepseek_v2", {"expert_gating_func": 2}, "e_score_correction_bias"),
        ("deepseek_v3", {"expert_gating_func": None, "expert_weights_norm": None}, "no place in a deepseek_v2 model"),
        ("deepseek_v3", {"expert_group_count": 3}, "expert_group_count"),
        ("deepseek_v3", {"expert_group_count": 8, "expert_group_used_count": 7}, "two experts at least"),
        ("deepseek_v3", {"rope.dimension_count": 7}, "rope.dimension_count"),
        ("deepseek_v3", {"attention.kv_lora_rank": 16}, "has shape"),
        ("deepseek_v3", {"nextn_predict_layers": 3}, "nextn_predict_layers"),
        ("deepseek_v3", {"nextn_predict_layers": 1 << 30, "block_count": (1 << 30) + 2}, r"\[0, 64\] beside"),
        ("deepseek_v3", {"attention.temperature_scale": 2.0}, "not a known setting"),
        ("qwen3_5_text", {"ssm.inner_size": 193}, "ssm.inner_size"),
        ("qwen3_5_text", {"ssm.group_count": 4}, "ssm.time_step_rank"),
        ("qwen3_5_text", {"ssm.state_size": 8}, "has shape"),
        ("qwen3_5_text", {"ssm.conv_kernel": 9}, "ssm.conv_kernel"),
        ("qwen3_5_text", {"ssm.dt_b_c_rms": True}, "not a known setting"),
        ("qwen3_5_text", {"rope.dimension_count": 18}, "rope.dimension_count"),
        ("qwen3_5_text", {"attention.recurrent_layers": [True]}, "recurrent_layers"),
        ("qwen3_5_text", {"full_attention_interval": 4}, "without attention"),
        ("qwen3_5_text", {"expert_count": 4}, "mixtures of experts"),
        ("qwen3_5_moe_text", {"expert_count": 5}, "there are 5 experts"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    name: str, settings: dict[str, object], named: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    path = export_gguf(folders[name], tmp_path / "m.gguf", settings=settings)
    with pytest.raises(ModelLoadError, match=named):
        open_checkpoint(files_at(path))


@pytest.mark.parametrize(
    ("name", "tensor"), [("deepseek_v3", "attn_v_b.weight"), ("qwen3_next", "ssm_ba.weight"), ("qwen3_5_text", "ssm_a")]
)
def test_a_missing_part_is_named(name: str, tensor: str, folders: dict[str, Path], tmp_path: Path) -> None:
    path = export_gguf(folders[name], tmp_path / "m.gguf", without=[f"blk.1.{tensor}"])
    with pytest.raises(ModelLoadError, match="layers.1.*is missing"):
        open_checkpoint(files_at(path))


def test_a_decay_that_is_no_decay_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    wrong = {"blk.0.ssm_a": np.full(6, 0.5, np.float32)}
    path = export_gguf(folders["qwen3_5_text"], tmp_path / "m.gguf", tensors=wrong)
    with pytest.raises(ModelLoadError, match="blk.0.ssm_a.*not finite"):
        load_bench(path)


@pytest.mark.parametrize("moves_groups", [True, False])
def test_columns_take_their_factors_along(moves_groups: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-128, 128, (3, 128), generator=generator, dtype=torch.int8)
    factors = torch.rand(3, 4, generator=generator).half()
    weight = LevelWeight(levels, factors, factors * 2, nibbles=False)
    size = 32 if moves_groups else 16
    order = np.arange(128).reshape(-1, 2, size).swapaxes(0, 1).reshape(-1)
    moved = reorder_columns(weight, order)
    assert torch.equal(moved.values(), weight.values()[:, torch.from_numpy(order)])
    assert (moved.columns is None) is moves_groups
