"""vLLM-CPU, in process. Options: `eager` (no compilation), `prefix_cache`, `kv_gib`."""

from __future__ import annotations

import importlib
import os
from typing import Any

from benchmarks.cpu.job import Ask, Engine, Job


class VllmEngine:
    def __init__(self, llm: Any, vllm: Any, versions: dict[str, str]) -> None:
        self._llm, self._sampling, self.versions = llm, vllm.SamplingParams, versions
        self._beams = importlib.import_module("vllm.sampling_params").BeamSearchParams

    def generate(self, asks: list[Ask]) -> list[list[list[int]]]:
        self._llm.reset_prefix_cache()  # a repeat must not find the run before it
        prompts = [{"prompt_token_ids": ask.prompt_ids} for ask in asks]
        if asks[0].beam_width:
            return self._search(prompts, asks[0])
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

    def _search(self, prompts: list[dict[str, Any]], ask: Ask) -> list[list[list[int]]]:
        """Run a beam search for all prompts. vLLM's beam search has one width and one length for all of them."""
        beams = self._beams(beam_width=ask.beam_width, max_tokens=ask.max_tokens, ignore_eos=True)
        best = [output.sequences[0].tokens for output in self._llm.beam_search(prompts, beams)]
        pairs = zip(best, prompts, strict=True)
        return [[list(tokens[len(prompt["prompt_token_ids"]) :])] for tokens, prompt in pairs]


def open_engine(job: Job) -> Engine:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(job.options.get("kv_gib", 2))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = job.options.get("cores", f"0-{job.threads - 1}")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    vllm: Any = importlib.import_module("vllm")  # by name, because it is installed in a separate environment
    llm = vllm.LLM(
        job.model,
        dtype=job.dtype,
        max_model_len=job.max_model_len,
        enforce_eager=job.options.get("eager", False),
        enable_prefix_caching=job.options.get("prefix_cache", True),
        skip_tokenizer_init=not any(ask.beam_width for asks in job.workloads.values() for ask in asks),
        disable_log_stats=True,
        seed=0,
    )
    return VllmEngine(llm, vllm, {"vllm": vllm.__version__, "torch": torch.__version__})
