"""Measures decoding and prompts of small hybrid models with random weights on a CPU.

    python -m benchmarks.hybrids                                     # all shapes, one thread, CPU time
    python -m benchmarks.hybrids --shapes lfm2 --threads 2 --clock wall --repeats 5
    PYTHONPATH=OTHER/src python -m benchmarks.hybrids                # another checkout's code: compare in turns

Shapes are those of the released models; all weights are random, so no file is fetched. Figures are tokens per second
(greedy): of a single stream and of 8 streams that decode after prompts of 16 tokens, and of a prompt of 512 tokens
until its first token. Results are medians; the last column is the slowest repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import facts, publish, save

_COMMON = {"vocab_size": 49_152, "max_position_embeddings": 4_096, "bos_token_id": None, "eos_token_id": None}
_GRANITE_LAYERS = ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)]
SHAPES: dict[str, dict[str, Any]] = {
    "lfm2": {  # LFM2-350M
        "model_type": "lfm2", "hidden_size": 1_024, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 8, "block_ff_dim": 6_656, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "granite": {  # Granite 4.0 H 350M
        "model_type": "granitemoehybrid", "hidden_size": 768, "num_hidden_layers": 32, "num_attention_heads": 12,
        "num_key_value_heads": 4, "shared_intermediate_size": 2_048, "num_local_experts": 0, "mamba_n_heads": 48,
        "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
        "layer_types": _GRANITE_LAYERS, "position_embedding_type": "nope", "intermediate_size": 2_048,
    },
    "mamba": {  # Mamba-130M
        "model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "conv_kernel": 4,
        "time_step_rank": 48, "intermediate_size": 1_536, "tie_word_embeddings": True,
    },
}  # fmt: skip
LOADS = {"single stream": (1, 16, 32), "8 streams": (8, 16, 32), "prompt of 512": (1, 512, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="by commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="wall: only where nothing else runs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    given, where, rows = parser.parse_args(), facts(), []
    for shape in given.shapes.split(","):
        for load, speeds in _measure(SHAPES[shape], given).items():
            rows.append((f"{shape}, {load}", round(statistics.median(speeds), 1), round(min(speeds), 1)))
    title = f"hybrid models, tokens per second of {given.clock} time"
    publish(title, ("load", "tok/s", "slowest"), rows, where)
    save(given.out, title, where, {"rows": rows})


def _measure(shape: dict[str, Any], given: argparse.Namespace) -> dict[str, list[float]]:
    """Return the speeds of each load, with loads in turns."""
    import quire

    clock, found = time.process_time if given.clock == "cpu" else time.perf_counter, {load: [] for load in LOADS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_COMMON | shape))
        llm = quire.LLM(
            folder, device="cpu", dtype=given.dtype, threads=given.threads, load_format="dummy", verbose=False,
            skip_tokenizer_init=True, generation_config="none",
        )  # fmt: skip
        for repeat in range(given.repeats + 1):
            for load, (streams, prompt, tokens) in LOADS.items():
                sampling = quire.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                prompts = [[(17 * stream + 31 * i) % 1_000 + 100 for i in range(prompt)] for stream in range(streams)]
                llm.reset_prefix_cache()
                begin = clock()
                llm.generate(prompts, sampling, use_tqdm=False)
                if repeat:  # the first one warms up
                    found[load].append((prompt if tokens == 1 else streams * tokens) / (clock() - begin))
    return found


if __name__ == "__main__":
    main()
