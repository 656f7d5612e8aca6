"""Quire's offline API. `options` are passed to LLM unchanged: `block_size`, `max_num_seqs`, `kv_cache_memory`, ..."""

from __future__ import annotations

from benchmarks.cpu.job import Ask, Engine, Job


class QuireEngine:
    def __init__(self, job: Job) -> None:
        import torch

        import quire

        self._llm = quire.LLM(
            job.model or None,
            dtype=job.dtype,
            device="cpu",
            threads=job.threads,
            max_model_len=job.max_model_len,
            verbose=False,
            **job.options,
        )
        self._sampling, self._beams = quire.SamplingParams, quire.BeamSearchParams
        self.versions = {"quire": quire.__version__, "torch": torch.__version__}

    def generate(self, asks: list[Ask]) -> list[list[list[int]]]:
        self._llm.reset_prefix_cache()  # a repeat must not find the run before it
        return self._search(asks) if asks[0].beam_width else self._sample(asks)

    def _search(self, asks: list[Ask]) -> list[list[list[int]]]:
        beams = [self._beams(ask.beam_width, ask.max_tokens, n=1, ignore_eos=True) for ask in asks]
        outputs = self._llm.beam_search([ask.prompt_ids for ask in asks], beams)
        return [[output.sequences[0].output_token_ids] for output in outputs]

    def _sample(self, asks: list[Ask]) -> list[list[list[int]]]:
        sampling = [
            self._sampling(
                n=ask.n, temperature=ask.temperature, max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False
            )
            for ask in asks
        ]
        outputs = self._llm.generate([ask.prompt_ids for ask in asks], sampling, use_tqdm=False)
        return [[sample.token_ids for sample in output.outputs] for output in outputs]


def open_engine(job: Job) -> Engine:
    return QuireEngine(job)
