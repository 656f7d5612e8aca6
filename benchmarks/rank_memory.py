"""Prints the memory of each rank: bytes of its weights and of its KV cache, compared with one process.

    python -m benchmarks.rank_memory --ranks 1,2,4            # random weights in the shape of Qwen3-0.6B
    python -m benchmarks.rank_memory --model FOLDER --ranks 1,2

Ranks are processes that share every layer (`tensor_parallel_size`), on this CPU. The number of KV blocks is the same
for all: each rank has the part of every block for its heads. The share is that of the largest rank relative to one
process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import facts, save
from quire import LLM
from quire.config.sizes import format_size
from quire.runtime.executor.ranked import RankedExecutor
from quire.serving.client import InProcessClient

SHAPE: dict[str, Any] = {  # of Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1_024,
    "intermediate_size": 3_072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 151_645,
}  # fmt: skip


def measure(folder: Path, num_ranks: int, num_blocks: int, load_format: str) -> list[tuple[int, int]]:
    """Return the bytes of weights and of KV cache, by rank."""
    ranks: dict[str, Any] = {"executor": "processes", "tensor_parallel_size": num_ranks}
    sizes: dict[str, Any] = {"num_kv_blocks": num_blocks, "max_model_len": 1_024, "max_num_seqs": 8, "device": "cpu"}
    with LLM(folder, **ranks, **sizes, load_format=load_format, skip_tokenizer_init=True) as llm:
        assert isinstance(llm._client, InProcessClient)
        executor = llm._client._core.executor
        assert isinstance(executor, RankedExecutor)
        return [executor.num_bytes[rank] for rank in range(num_ranks)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with weights (random ones of Qwen3-0.6B's shape)")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks; the first is what others are compared with")
    parser.add_argument("--blocks", type=int, default=512, help="KV blocks of 16 tokens (512)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args(arguments)
    where, found = facts(), dict[int, list[tuple[int, int]]]()
    with tempfile.TemporaryDirectory() as made:
        folder = args.model or Path(made)
        if args.model is None:
            (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        for count in map(int, args.ranks.split(",")):
            found[count] = measure(folder, count, args.blocks, "auto" if args.model else "dummy")
    one = next(iter(found.values()))[0]
    print("ranks | weights of a rank |  share | KV cache of a rank |  share")
    for count, rows in found.items():
        weights, cache = max(row[0] for row in rows), max(row[1] for row in rows)
        print(
            f"{count:5} | {format_size(weights):>17} | {weights / one[0]:6.1%} |"
            f" {format_size(cache):>18} | {cache / one[1]:6.1%}"
        )
    save(args.json, "memory of ranks", where, {str(count): rows for count, rows in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
