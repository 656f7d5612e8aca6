"""Ranks that have whole experts: what they hold, what they read, and what they send one another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gloo_sum_main
from interpreter import HAS_TRITON
from local_ranks import LocalGroup, run_ranks
from quire.config.model import Experts, Heads, ModelConfig, Rope
from quire.config.parallel import ParallelConfig, share_of
from quire.config.rank_model import largest_rank
from quire.runtime.layers.builder import LayerBuilder
from quire.runtime.layers.experts import SeparateExperts
from quire.runtime.layers.stacked_experts import ExpertLinear
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.loading.hf.checkpoint import HfCheckpoint
from quire.runtime.loading.pieces import Piece
from quire.runtime.loading.weights import load_weights, randomize_weights
from quire.runtime.models.base import BaseModel
from quire.runtime.models.build import build_model, count_rank_weights, describe_weights
from quire.runtime.parallel.expert_sum import ExpertSum, expert_sum, saved_share
from quire.runtime.parallel.group import ONE_RANK
from quire.runtime.parallel.ranks import ALONE, Ranks
from tests.unit.runtime.parallel.test_rank_memory import Silent, held_bytes
from tiny_models import MemoryCheckpoint, engine_config, tiny_config
from worker_executor import TinyEngine

SIZES: dict[str, Any] = {  # whose parts fill the panels that compiled kernels pack weights into
    "vocab_size": 1536, "hidden_size": 192, "heads": Heads(num_query=8, num_kv=4, dim=48),
    "rope": Rope(max_position=64),
}  # fmt: skip
MIXTURE = Experts(7, 2, 384)


def ranks_of(size: int) -> list[Ranks]:
    config = ParallelConfig(tensor=size, expert=True)
    return [Ranks(config.place(rank), Silent(rank, size), ONE_RANK) for rank in range(size)]


def build(config: ModelConfig, ranks: Ranks, attention: str) -> BaseModel:
    device = replace(engine_config().device, attention_backend=attention)
    return build_model(config, LayerBuilder(device, config.heads, 4, ranks=ranks))


def noise(config: ModelConfig) -> MemoryCheckpoint:
    generator = torch.Generator().manual_seed(0)
    return MemoryCheckpoint(
        config, {name: torch.randn(shape, generator=generator) for name, shape in describe_weights(config).items()}
    )


def is_of_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("attention", ["gather", "auto"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_and_reads_whole_experts_and_its_share_of_other_layers(attention: str, size: int) -> None:
    config = tiny_config("mixtral", **SIZES, experts=MIXTURE)
    checkpoint = noise(config)
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    in_experts = sum(tensor.nbytes for name, tensor in checkpoint.tensors.items() if is_of_expert(name))
    read: list[set[str]] = []
    for rank, ranks in enumerate(ranks_of(size)):
        model, own = build(config, ranks, attention), share_of(MIXTURE.num, rank, size)
        checkpoint.reads.clear()
        load_weights(model, checkpoint)
        read.append({name for name in checkpoint.reads if is_of_expert(name)})
        assert {int(name.split(".experts.")[1].split(".")[0]) for name in read[-1]} == set(own)
        share = (total - in_experts) / size + in_experts * len(own) / MIXTURE.num
        assert held_bytes(model) == pytest.approx(share, rel=0.05)
    assert sum(map(len, read)) == len(set().union(*read)) == 3 * 3 * MIXTURE.num  # matrices, layers


def test_the_counted_weights_of_a_rank_equal_its_weights() -> None:
    config = tiny_config("mixtral", **SIZES, experts=MIXTURE)
    counted = count_rank_weights(config, ParallelConfig(tensor=2, expert=True)).rank_weights
    assert counted is not None
    model = build(config, ranks_of(2)[0], "gather")
    load_weights(model, noise(config))
    assert held_bytes(model) == pytest.approx(4 * counted.parameters, rel=0.02)
    cut = count_rank_weights(config, ParallelConfig(tensor=2)).rank_weights
    assert cut is not None
    assert counted.parameters > cut.parameters  # the first rank has four of seven experts


def test_tensors_of_other_experts_must_be_in_the_files() -> None:
    config = tiny_config("mixtral", **SIZES, experts=MIXTURE)
    checkpoint = noise(config)
    del checkpoint.tensors["model.layers.1.block_sparse_moe.experts.6.w1.weight"]  # the other rank's
    with pytest.raises(Exception, match=r"experts\.6\.w1\.weight.*is missing"):
        load_weights(build(config, ranks_of(2)[0], "gather"), checkpoint)


def experts_of(model: BaseModel) -> Iterator[tuple[str, Any]]:
    for layer, module in enumerate(module for module in model.modules() if isinstance(module, SeparateExperts)):
        for number, expert in module.items():
            yield f"{layer}.{number}", expert


def test_random_weights_are_the_same_with_whole_experts() -> None:
    config = tiny_config("mixtral", **SIZES, experts=MIXTURE)
    models = [build(config, ranks, "gather") for ranks in (ALONE, *ranks_of(2))]
    for model in models:
        randomize_weights(model, seed=3)
    whole, x = dict(experts_of(models[0])), torch.randn(2, config.hidden_size)
    parts = [pair for model in models[1:] for pair in experts_of(model)]
    assert sorted(name for name, _ in parts) == sorted(whole)
    for name, expert in parts:
        assert torch.equal(expert(x).value(), whole[name](x).value())


class Pieces:
    """What is read of the files of a checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[Piece] = []
        read_whole = HfCheckpoint._read_whole

        def noted(checkpoint: HfCheckpoint, piece: Piece, *given: Any, **named: Any) -> Tensor:
            self.read.append(piece)
            return read_whole(checkpoint, piece, *given, **named)

        monkeypatch.setattr(HfCheckpoint, "_read_whole", noted)


GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 64, "hidden_size": 64,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_local_experts": 5, "num_experts_per_tok": 2, "max_position_embeddings": 512,
    "layer_types": ["sliding_attention"], "sliding_window": 8, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


def write_gpt_oss(folder: Path, size: int = 32) -> None:
    """With MXFP4 experts of this intermediate size."""
    (folder / "config.json").write_text(json.dumps(GPT_OSS | {"intermediate_size": size}))
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    path, experts = "model.layers.0.", "model.layers.0.mlp.experts."
    sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    tensors = {f"{path}self_attn.{name}.weight": noise(*shape) for name, shape in sizes.items()}
    tensors |= {f"{path}self_attn.{name}.bias": noise(shape[0]) for name, shape in sizes.items()}
    tensors |= {f"{path}{name}.weight": noise(64) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {"model.embed_tokens.weight": noise(64, 64), "lm_head.weight": noise(64, 64)}
    tensors |= {"model.norm.weight": noise(64), f"{path}self_attn.sinks": noise(4)}
    tensors |= {f"{path}mlp.router.weight": noise(5, 64), f"{path}mlp.router.bias": noise(5)}
    for name, (outputs, inputs) in {"gate_up_proj": (2 * size, 64), "down_proj": (64, size)}.items():
        blocks = torch.randint(0, 256, (5, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{experts}{name}_blocks"] = blocks
        tensors[f"{experts}{name}_scales"] = torch.full((5, outputs, inputs // 32), 120, dtype=torch.uint8)
        tensors[f"{experts}{name}_bias"] = noise(5, outputs)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("attention", ["gather", "auto"])
def test_a_rank_reads_only_its_own_stacked_mxfp4_experts(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gpt_oss(tmp_path)
    pieces, found = Pieces(monkeypatch), []
    for rank, ranks in enumerate(ranks_of(2)):
        checkpoint = open_checkpoint(files_at(tmp_path))
        model = build(checkpoint.config, ranks, attention)
        pieces.read.clear()
        load_weights(model, checkpoint)
        experts = {piece.expert for piece in pieces.read if piece.expert is not None}
        assert experts == set(share_of(5, rank, 2))
        found.append([piece for piece in pieces.read if piece.expert is not None])
    each = 2 * 3 + 3  # blocks and scales of gate, up and down, and their biases
    assert [len(read) for read in found] == [3 * each, 2 * each]


@pytest.mark.parametrize("attention", ["gather", "auto"])
def test_ranks_with_mxfp4_experts_give_the_outputs_of_one(attention: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    prompts, found = [[3, 17, 42, 5, 60, 11, 29, 8, 1, 33], [4, 4, 17]], []
    for settings in ({}, {"tensor": 2, "expert": True}):
        checkpoint = open_checkpoint(files_at(tmp_path))
        engine = TinyEngine(checkpoint, attention=attention, **settings)  # type: ignore[arg-type]
        found.append(engine.answers(prompts, max_tokens=8))
        engine.executor.close()
    assert found[1] == found[0]


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_ranks_with_parts_of_mxfp4_experts_hold_them_as_they_are_stored_and_as_planned(tmp_path: Path) -> None:
    from quire.kernels.triton.grouped_w4 import W4Stack

    write_gpt_oss(tmp_path, size=352)
    parallel, held = ParallelConfig(tensor=2), []
    for rank in range(2):
        checkpoint = open_checkpoint(files_at(tmp_path))
        model = build(checkpoint.config, Ranks(parallel.place(rank), Silent(rank, 2), ONE_RANK), "triton")
        load_weights(model, checkpoint)
        stacks = [layer.stack for layer in model.modules() if isinstance(layer, ExpertLinear)]
        assert len(stacks) == 2
        assert all(isinstance(stack, W4Stack) for stack in stacks)
        held.append(sum(each.data.nbytes + each.scales.nbytes for each in stacks if isinstance(each, W4Stack)))
    assert max(held) <= largest_rank(open_checkpoint(files_at(tmp_path)).config, parallel).levels.gpu_bytes


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 7, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_all_to_all_is_the_sum_over_ranks_and_sends_no_zeros(
    tokens: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.parallel.expert_sum.LEAST_ROWS", 1)
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.stack([torch.randperm(16, generator=generator)[:2] for _ in range(tokens)])
    chosen[tokens // 2 :: 5] = -1  # padding
    owners = torch.arange(16) * size // 16
    values = torch.randn(size, tokens, 6, generator=generator).to(dtype)
    held = torch.stack([((owners[chosen.clamp(min=0)] == rank) & (chosen >= 0)).any(dim=1) for rank in range(size)])
    values[~held] = 0.0
    sent: list[int] = []

    def work(group: LocalGroup) -> Tensor:
        send = group.all_to_all
        group.all_to_all = lambda parts, shapes: sent.extend(map(len, parts)) or send(parts, shapes)  # type: ignore[method-assign, func-returns-value]
        total = ExpertSum(group, owners)
        return total.of(values[group.index].clone(), total.senders(chosen))

    wanted = values[0].float()
    for other in values[1:]:
        wanted = wanted + other.float()
    assert all(torch.equal(found, wanted.to(dtype)) for found in run_ranks(size, work))
    shares = [share_of(tokens, rank, size) for rank in range(size)]
    own = sum(int(held[rank, share.start : share.stop].sum()) for rank, share in enumerate(shares))
    assert sum(sent) == int(held.sum()) - own


def test_processes_send_rows_over_gloo(tmp_path: Path) -> None:
    main, environment = Path(gloo_sum_main.__file__), {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(main.parent), *sys.path])
    commands = [[sys.executable, str(main), rank, "3", str(tmp_path / "store")] for rank in "012"]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for command in commands]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 3
    first, *others = gloo_sum_main.given(3)[1]
    for other in others:
        first = first + other
    assert [each.strip().splitlines()[-1] for each in said] == [gloo_sum_main.digest(first)] * 3


@pytest.mark.parametrize(("num", "used", "size"), [(8, 2, 2), (8, 2, 4), (7, 2, 2), (6, 3, 4)])
def test_the_saving_of_an_all_to_all_is_the_mean_over_all_choices(num: int, used: int, size: int) -> None:
    """An all-reduce sends every row to its owner from each other rank, and every sum back to each of them."""
    ranks = [rank for rank in range(size) for _ in share_of(num, rank, size)]
    choices = list(combinations(range(num), used))
    senders = sum(len({ranks[expert] for expert in chosen}) for chosen in choices) / len(choices)
    rows = (senders * (size - 1) / size + size - 1) / (2 * (size - 1))
    assert saved_share(num, used, size) == pytest.approx(1 - rows)


def test_an_all_to_all_is_chosen_where_it_saves_an_eighth() -> None:
    class Shared(Silent):
        shared = object()  # type: ignore[assignment]

    def is_sparse(experts: Experts, group: Any, *, whole: bool = True) -> bool:
        return expert_sum(group, experts, whole=whole)._owners is not None

    mixtral, qwen3 = Experts(8, 2, 64), Experts(128, 8, 64)
    assert is_sparse(mixtral, Silent(0, 4))
    assert not is_sparse(mixtral, Silent(0, 2))  # 11 %
    assert is_sparse(qwen3, Silent(0, 8))
    assert not is_sparse(qwen3, Silent(0, 4))
    assert not is_sparse(mixtral, Silent(0, 4), whole=False)
    assert not is_sparse(replace(mixtral, shared_size=64), Silent(0, 4))
    assert not is_sparse(mixtral, Shared(0, 4))
    many, few = torch.zeros(1024, 2, dtype=torch.int64), torch.zeros(1023, 2, dtype=torch.int64)
    total = expert_sum(Silent(0, 4), mixtral, whole=True)
    assert total.senders(many) is not None
    assert total.senders(few) is None
