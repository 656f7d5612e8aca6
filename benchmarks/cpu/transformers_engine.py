"""transformers' `generate` over static batches: the next batch starts when the longest answer of this one is done.

Option: `batch_size`. Only the tokens a request asked for count; those its batch made it wait for do not.
"""

from __future__ import annotations

from typing import Any

from benchmarks.cpu.job import Ask, Engine, Job


class TransformersEngine:
    def __init__(self, model: Any, batch_size: int, versions: dict[str, str]) -> None:
        self._model, self._batch_size, self.versions = model, batch_size, versions

    def generate(self, asks: list[Ask]) -> list[list[list[int]]]:
        answers: list[list[list[int]]] = []
        batch: list[Ask] = []
        for ask in asks:
            full = sum(_rows(other) for other in batch) + _rows(ask) > self._batch_size
            if batch and (full or _kind(ask) != _kind(batch[0])):
                answers += self._run(batch)
                batch = []
            batch.append(ask)
        return answers + self._run(batch)

    def _run(self, batch: list[Ask]) -> list[list[list[int]]]:
        import torch

        width, longest, n = max(len(a.prompt_ids) for a in batch), max(a.max_tokens for a in batch), batch[0].n
        ids = torch.zeros(len(batch), width, dtype=torch.int64)  # [requests, width], padded on the left
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(batch):
            ids[row, width - len(ask.prompt_ids) :] = torch.tensor(ask.prompt_ids)
            mask[row, width - len(ask.prompt_ids) :] = 1
        sampling: dict[str, Any] = {"do_sample": False, "num_beams": batch[0].beam_width or 1}
        if batch[0].temperature > 0.0:
            sampling = {"do_sample": True, "temperature": batch[0].temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, num_return_sequences=n, use_cache=True, **sampling
            )
        new = out[:, width:].tolist()  # [requests * n, longest]
        return [[new[row * n + i][: ask.max_tokens] for i in range(n)] for row, ask in enumerate(batch)]


def _rows(ask: Ask) -> int:
    """Return how many rows of a batch a request takes."""
    return max(ask.n, ask.beam_width)


def _kind(ask: Ask) -> tuple[int, float, int]:
    """Return the kind of a request. Requests of one kind can share a batch."""
    return ask.n, ask.temperature, ask.beam_width


def open_engine(job: Job) -> Engine:
    import torch
    import transformers

    torch.set_num_threads(job.threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return TransformersEngine(model, job.options.get("batch_size", 16), versions)
