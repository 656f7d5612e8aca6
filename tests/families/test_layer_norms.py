"""What families of layer norms and plain MLPs share: programs, decode graphs, positions past the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from family_bench import hf_checkpoint, logits_of
from quire.kernels.native.loader import why_not_native
from quire.kernels.native.program_run import Program
from quire.runtime.layers.blocks import Blocks
from quire.runtime.layers.modules import PositionEmbedding
from quire.runtime.layers.weights import Placement
from quire.runtime.loading.checkpoint import open_checkpoint
from quire.runtime.loading.files import files_at
from quire.runtime.sampling.make import make_sampler
from quire.runtime.worker.decode_graphs import DecodeGraphs
from quire.types.step import Chunk
from tiny_models import DEVICE, VOCAB, Bench, engine_config

transformers = pytest.importorskip("transformers")
LENGTH = {"vocab_size": VOCAB, "max_position_embeddings": 64}
DEEP = {**LENGTH, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=2, n_head=2),
    "opt": lambda: transformers.OPTConfig(**DEEP, ffn_dim=96),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**DEEP, intermediate_size=96),
    "falcon": lambda: transformers.FalconConfig(**DEEP),
    "nemotron": lambda: transformers.NemotronConfig(**DEEP, intermediate_size=96, num_key_value_heads=2),
}
REFUSAL = why_not_native(torch.float32, torch.device("cpu"))


@pytest.mark.skipif(REFUSAL is not None or DEVICE != "cpu", reason=str(REFUSAL or "runs on a CPU"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_program_gives_bit_for_bit_what_its_blocks_give(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_checkpoint(tmp_path, CONFIGS[family]())
    program = logits_of(folder, dtype=dtype)
    monkeypatch.setattr(Blocks, "_run_program", Blocks._run_layers)
    monkeypatch.delattr(Program, "run")
    for (_, found), (_, want) in zip(program, logits_of(folder, dtype=dtype), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_decode_graphs_add_the_vectors_of_positions(family: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    folder = hf_checkpoint(tmp_path, CONFIGS[family]())
    tokens = []
    for attention in ("reference", "triton"):
        config = engine_config(rows=4, num_blocks=64, max_len=64)
        kernels = "triton" if attention == "triton" else "torch"
        sampler = make_sampler(4, VOCAB, torch.device(config.device.device), kernels)
        bench = Bench(open_checkpoint(files_at(folder)), config, attention=attention, sampler=sampler)  # type: ignore[arg-type]
        assert isinstance(bench.worker._graphs, DecodeGraphs) == (attention == "triton")
        bench.add(0, [5, 6, 7])
        bench.add(1, [11])
        bench.add(2, [9, 2])
        bench.run(chunks=[Chunk(0, 0, 3, (0,)), Chunk(1, 0, 1, (1,)), Chunk(2, 0, 2, (2,))])
        for _ in range(2):
            bench.run(decode=[0, 2, 1])  # padded to four
        tokens.append(bench.tokens)
    assert tokens[0] == tokens[1]


def test_a_position_past_the_end_takes_the_last_vector() -> None:
    table = PositionEmbedding("wpe", 4, 2, Placement(torch.float32, torch.device("cpu")), offset=1)
    table.load("wpe.weight", torch.arange(10.0).view(5, 2))
    assert table(torch.tensor([0, 3, 4, 9])).tolist() == [[2, 3], [8, 9], [8, 9], [8, 9]]
