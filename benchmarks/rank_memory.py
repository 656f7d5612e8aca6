"""Prints the memory of each rank: bytes of its weights and of its KV cache, compared with one process.

    python -m benchmarks.rank_memory --ranks 1,2,4            # random weights in the shape of Qwen3-0.6B
    python -m benchmarks.rank_memory --shape deepseek --ranks 1,2
    python -m benchmarks.rank_memory --model PATH --ranks 1,2

Ranks are processes that share every layer (`tensor_parallel_size`), on this CPU. The number of KV blocks is the same
for all: each rank has the part of every block for its heads. The share is that of the largest rank relative to one
process. Models with recurrent layers keep their states in the same memory.
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

COMMON: dict[str, Any] = {
    "max_position_embeddings": 8_192, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 2, "vocab_size": 49_152,
}  # fmt: skip
SMALL: dict[str, Any] = COMMON | {"hidden_size": 1_024, "num_attention_heads": 16, "num_hidden_layers": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": COMMON | {  # Qwen3-0.6B
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1_024,
        "intermediate_size": 3_072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "eos_token_id": 151_645,
    },
    "smollm2": COMMON | {  # SmolLM2-135M, whose heads do not divide by 2
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1_536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "mixtral": SMALL | {  # a mixture of experts
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 1_792,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek": SMALL | {  # latent attention (MLA) and a mixture with shared experts
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "intermediate_size": 3_072,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 512, "n_routed_experts": 16,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "qwen3_next": SMALL | {  # linear attention in three of four layers, and a mixture
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "intermediate_size": 2_048,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "partial_rotary_factor": 0.25,
    },
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
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--model", type=Path, help="a folder with weights, or a GGUF file")
    chosen.add_argument("--shape", choices=SHAPES, default="qwen3", help="random weights of such a model (qwen3)")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks; the first is what others are compared with")
    parser.add_argument("--blocks", type=int, default=512, help="KV blocks of 16 tokens (512)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args(arguments)
    where, found = facts(), dict[int, list[tuple[int, int]]]()
    with tempfile.TemporaryDirectory() as made:
        folder = args.model or Path(made)
        if args.model is None:
            (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]), encoding="utf-8")
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
