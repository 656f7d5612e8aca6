"""Rows, histories and logits for the sampler's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.runtime.sampling.history import TokenHistory
from quire.runtime.sampling.sampler import Sampled, Sampler
from quire.runtime.sampling.samples import Samples
from quire.runtime.sampling.transforms.transform import Step, Transform
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.step import Masks, NewRow, RowLogprobs

CPU = torch.device("cpu")


def new_row(
    row: int = 0,
    *,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    rules: TokenRules | None = None,
    seed: int = 0,
    sample_index: int = 0,
    **params: Any,
) -> NewRow:
    return NewRow(
        row=row,
        token_ids=np.array([*prompt, *output], dtype=np.int32),
        num_prompt_tokens=len(prompt),
        block_ids=(),
        sampling=SamplingParams(**params),
        rules=rules or TokenRules(),
        sample_index=sample_index,
        seed=seed,
    )


class LargestTensor(TorchDispatchMode):
    """While entered, notes how many numbers the largest tensor has that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.num_numbers = max(self.num_numbers, each.numel())
        return made


class Bench:
    """A sampler and the history a worker would keep for it. Places without a token hold an id out of any vocabulary."""

    def __init__(self, vocab_size: int, num_rows: int = 16, capacity: int = 64, device: torch.device = CPU) -> None:
        self.sampler = Sampler(num_rows, vocab_size, device)
        self.device = device
        self.history = TokenHistory(
            tokens=torch.full((num_rows, capacity), 2**30, dtype=torch.int32, device=device),
            lengths=torch.zeros(num_rows, dtype=torch.int64, device=device),
            num_prompt=torch.zeros(num_rows, dtype=torch.int32, device=device),
        )

    def add(self, new: NewRow) -> None:
        self.sampler.add(new)
        self.history.tokens[new.row] = 2**30
        self.history.tokens[new.row, : len(new.token_ids)] = torch.from_numpy(new.token_ids).to(self.device)
        self.history.lengths[new.row] = len(new.token_ids)
        self.history.num_prompt[new.row] = new.num_prompt_tokens

    def sample(self, logits: Tensor, rows: Sequence[int]) -> Sampled:
        """Sample from a copy of the logits and append the tokens, as a worker does."""
        numbers = np.array(rows, dtype=np.int32)
        sampled = self.sampler.sample(logits.to(self.device, copy=True), self.samples(rows), self.history)
        places = torch.from_numpy(numbers).long().to(self.device)
        self.history.tokens[places, self.history.lengths[places]] = sampled.token_ids.clamp(min=0).int()
        self.history.lengths[places] += 1
        self.sampler.check()
        return sampled

    def samples(self, rows: Sequence[int], lengths: Sequence[int] | None = None, masks: Masks | None = None) -> Samples:
        """One of each of `rows`, which know all their tokens, or so many."""
        numbers = np.array(rows, dtype=np.int32)
        known = self.history.lengths.cpu().numpy()[numbers] if lengths is None else np.array(lengths, dtype=np.int64)
        on_device = torch.from_numpy(known).to(self.device)
        return Samples(numbers, known, on_device, np.arange(len(numbers)), masks)

    def logprobs(self, sampled: Sampled) -> tuple[RowLogprobs, ...]:
        """What was told of the chosen tokens."""
        told = sampled.report.logprobs
        return told.finish([tensor.cpu() for tensor in told.tensors])

    def tokens(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        return [int(token) for token in self.sample(logits, rows).token_ids.tolist()]


def transform_rows(transform: Transform, logits: Tensor, news: Sequence[NewRow]) -> Tensor:
    """What one transform makes of logits [S, vocab] whose lines belong to `news`."""
    num_rows = 1 + max(new.row for new in news)
    bench = Bench(logits.shape[1], num_rows)
    for new in news:
        bench.add(new)
        transform.add(new)
    rows = np.array([new.row for new in news], dtype=np.int32)
    part = transform.members.part(rows, CPU)
    changed = logits.clone()
    if part is not None:
        num_prompt = bench.history.num_prompt.numpy().astype(np.int64)
        transform.apply(changed, part, Step(bench.samples(rows.tolist()), bench.history, num_prompt))
    return changed
