"""Qwen3-Next and Qwen3.5 against transformers: states that move, are kept and shared; other forms of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_bench import BACKENDS, PROMPTS, SIZES, change_config, check_parity, hf_checkpoint, load_bench, logits_of
from interpreter import HAS_TRITON
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.sampling.make import make_sampler
from quire.types.errors import ModelLoadError
from quire.types.step import Chunk
from tiny_models import DEVICE, Bench, engine_config, greedy_reference

transformers = pytest.importorskip("transformers")
LINEAR = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
}  # fmt: skip
PROMPT = [5, 9, 2, 11, 7, 3, 8, 1, 30, 12, 40, 13, 6, 6, 21]
COUNT = 5


def config(**changes: Any) -> Any:
    return transformers.Qwen3_5TextConfig(**(SIZES | LINEAR | changes))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_checkpoint(tmp_path_factory.mktemp("qwen3_5"), config())


@pytest.fixture(scope="module")
def tokens(path: Path) -> list[int]:
    return greedy(path, PROMPT)


def greedy(path: Path, prompt: list[int]) -> list[int]:
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return greedy_reference(model, prompt, COUNT)[0]


def decoded(bench: Bench, *rows: int) -> list[list[int]]:
    """What rows say that have said one token."""
    for _ in range(COUNT - 1):
        bench.run(decode=rows)
    return [bench.tokens[row][-COUNT:] for row in rows]


@pytest.mark.parametrize("attention", BACKENDS)
def test_another_row_goes_on_from_a_state_that_was_kept_in_the_middle_of_a_chunk(
    attention: str, path: Path, tokens: list[int]
) -> None:
    bench = load_bench(path, attention=attention)
    bench.add(0, PROMPT)
    bench.run(chunks=[Chunk(0, 0, 3)])
    kept = [bench.move(0, 4), bench.move(0, 8)]  # the states after so many tokens
    bench.run(chunks=[Chunk(0, 3, 12, (0,))])
    for row, start in ((1, 4), (2, 8)):
        bench.add(row, PROMPT, blocks=bench.tables[0][: start // bench.size], state=kept[row - 1])
    bench.run(decode=[0], chunks=[Chunk(1, 4, 11, (1,)), Chunk(2, 8, 7, (2,))])
    assert [bench.tokens[row][15:] for row in range(3)] == [tokens[:2], tokens[:1], tokens[:1]]
    bench.run(decode=[2, 0, 1])
    assert [bench.tokens[row][15:] for row in range(3)] == [tokens[:3], tokens[:2], tokens[:2]]


@pytest.mark.parametrize("attention", BACKENDS)
def test_forks_share_a_state_until_they_go_on(attention: str, path: Path, tokens: list[int]) -> None:
    bench = load_bench(path, attention=attention)
    bench.add(0, PROMPT)
    bench.run(chunks=[Chunk(0, 0, 15, (0,))])
    bench.add(1, bench.tokens[0], parent=0)
    bench.unshare_tail(1)
    other = [*PROMPT, (tokens[0] + 1) % SIZES["vocab_size"]]
    bench.add(2, other, parent=0)
    bench.unshare_tail(2)
    assert decoded(bench, 0, 1, 2)[:2] == [tokens] * 2
    assert bench.tokens[2][16:][: COUNT - 1] == greedy(path, other)[: COUNT - 1]


@pytest.mark.parametrize("attention", BACKENDS)
def test_a_row_that_decodes_may_leave_its_state_behind(attention: str, path: Path, tokens: list[int]) -> None:
    bench = load_bench(path, attention=attention)
    bench.add(0, PROMPT)
    bench.run(chunks=[Chunk(0, 0, 15, (0,))])
    bench.run(decode=[0])
    kept = bench.move(0, 16)  # the state after 16 tokens
    bench.run(decode=[0])
    bench.add(1, bench.tokens[0][:17], blocks=bench.tables[0], state=kept)
    bench.unshare_tail(1)
    for _ in range(2):
        bench.run(decode=[0, 1])
    assert bench.tokens[0][15:] == tokens
    assert bench.tokens[1][15:] == tokens[:4]


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_captured_steps_read_and_write_the_states_of_their_rows(path: Path, tokens: list[int]) -> None:
    """Graphs are captured in steps in which states move, and while other rows wait for their first token."""
    settings, device = engine_config(rows=3, num_blocks=64, max_len=64), torch.device(DEVICE)
    sampler = make_sampler(3, SIZES["vocab_size"], device, "triton")
    bench = Bench(open_checkpoint(files_at(path)), settings, attention="triton", sampler=sampler)  # type: ignore[arg-type]
    for row in (0, 2):
        bench.add(row, PROMPT)
    bench.run(chunks=[Chunk(2, 0, 15, (2,))])
    bench.run(decode=[2], chunks=[Chunk(0, 0, 15, (0,))])
    kept = bench.move(0, 15)
    bench.run(decode=[0])
    bench.run(decode=[2, 0])
    bench.add(1, bench.tokens[0][:16], blocks=bench.tables[0], state=kept)
    bench.unshare_tail(1)
    bench.run(decode=[2, 1, 0])
    bench.run(decode=[0, 1])
    assert [bench.tokens[row][15:] for row in range(3)] == [tokens, tokens[:3], tokens[:4]]
    assert len(bench.worker._graphs._graphs) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_a_row_is_used_again(attention: str, path: Path, tokens: list[int]) -> None:
    bench = load_bench(path, attention=attention)
    for _ in range(2):
        bench.add(0, PROMPT)
        bench.run(chunks=[Chunk(0, 0, 15, (0,))])
        assert decoded(bench, 0) == [tokens]
        bench.release(0)


@pytest.mark.parametrize("kv_dtype", ["float8", None])
@pytest.mark.parametrize("block_size", [1, 16])
def test_states_fit_behind_blocks_of_any_size(block_size: int, kv_dtype: str | None, path: Path) -> None:
    found = logits_of(path, block_size=block_size, kv_dtype=kv_dtype)
    for (_, logits), (_, wanted) in zip(found, logits_of(path), strict=True):
        torch.testing.assert_close(logits[0], wanted[0], rtol=0.1, atol=0.1 if kv_dtype else 1e-3)


def test_bfloat16_says_about_the_same(path: Path) -> None:
    for (_, logits), (_, wanted) in zip(logits_of(path, dtype="bfloat16"), logits_of(path), strict=True):
        torch.testing.assert_close(logits[0], wanted[0], rtol=0.1, atol=0.15)


def test_a_model_for_text_and_images_is_read_for_its_text(tmp_path: Path) -> None:
    text = {key: value for key, value in (SIZES | LINEAR).items() if key != "attn_implementation"}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
        "num_position_embeddings": 4,
    }  # fmt: skip
    tokens = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}
    whole = transformers.Qwen3_5Config(text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens)
    model = transformers.Qwen3_5ForConditionalGeneration(whole).eval().float()
    model.save_pretrained(tmp_path)
    for prompt, (_, logits) in zip(PROMPTS, logits_of(tmp_path), strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[0], wanted, rtol=1e-3, atol=2e-4)


def test_experts_may_be_stored_as_one_tensor(tmp_path: Path) -> None:
    some = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    hf_checkpoint(tmp_path, transformers.Qwen3NextConfig(**(SIZES | LINEAR | some)))
    wanted, file = logits_of(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    for path in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        experts = [
            {part: tensors.pop(f"{path}.experts.{number}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for number in range(4)
        ]
        both = torch.stack([torch.cat((expert["gate"], expert["up"])) for expert in experts])
        tensors[f"{path}.experts.gate_up_proj"] = both
        tensors[f"{path}.experts.down_proj"] = torch.stack([expert["down"] for expert in experts])
    save_file(tensors, file, {"format": "pt"})
    for (_, found), (_, want) in zip(logits_of(tmp_path), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["reference", "auto"])
def test_layers_without_experts_beside_those_with_some(attention: str, tmp_path: Path) -> None:
    more = {"mlp_only_layers": [0], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shared = {"shared_expert_intermediate_size": 16, "norm_topk_prob": False, "attention_bias": True}
    changed = transformers.Qwen3NextConfig(**(SIZES | LINEAR | more | shared))
    check_parity(hf_checkpoint(tmp_path, changed), attention=attention)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["linear_attention"] * 2),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("linear_num_value_heads", 0),
        ("linear_conv_kernel_dim", 9),
        ("attn_output_gate", False),
        ("hidden_act", "gelu"),
    ],
)
def test_what_would_change_the_output_is_refused(key: str, value: object, tmp_path: Path) -> None:
    change_config(hf_checkpoint(tmp_path, config()), **{key: value})
    with pytest.raises(ModelLoadError, match=key):
        open_checkpoint(files_at(tmp_path))
