"""The worker: obeys plans, owns all state of one device."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.runtime.attention.backend import AttentionBackend
from quire.runtime.models.registry import Model
from quire.runtime.worker.parts import make_parts
from quire.runtime.worker.runner import RowSampler, Runner, StepOutput
from quire.types.errors import InvalidRequest
from quire.types.step import Ints, NewRow, RowFailure, StepPlan


class Worker:
    """Owns rows, KV memory and sampler state. Plans must be executed in the order the engine made them."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        sampler: RowSampler,
        model_config: ModelConfig,
        config: EngineConfig,
    ) -> None:
        parts = make_parts(model, backend, sampler, model_config, config)
        self.rows, self.cache, self._graphs = parts.rows, parts.cache, parts.graphs
        self._sampler, self._vocab_size, self._prepare = sampler, model_config.vocab_size, parts.prepare
        self._runner = Runner(model, self.rows, parts.batches, parts.forward, sampler)
        self._failed: set[int] = set()  # live rows whose own code raised when they were added

    @torch.inference_mode()
    def prepare(self, seconds: float) -> None:
        """Do for about so long what the first requests would wait for. Changes no row and no block."""
        self._prepare(seconds)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry a plan out in its fixed order. On a GPU it may still be running when this returns."""
        self._release(plan.released)
        failures = self._add(plan.new_rows) if plan.new_rows else ()
        self.rows.grant(plan.grant_rows, plan.grant_slots, plan.grant_blocks)
        self.cache.copy(plan.copies)
        if plan.num_tokens == 0:
            empty = torch.empty(0, dtype=torch.int64, device=self.rows.device)
            return StepOutput(plan.step, plan.sample_rows, empty, (), (), failures)
        if not self._failed and self._graphs.takes(plan):
            output = self._graphs.run(plan)
        else:
            output = self._runner.run(plan, frozenset(self._failed))
        return replace(output, failures=failures + output.failures) if failures else output

    def check(self) -> None:
        """Waits for the device."""
        self.rows.check()
        self.cache.check()
        assert all(self.rows.live[row] for row in self._failed)

    def _release(self, rows: tuple[int, ...]) -> None:
        self.rows.release(rows)
        for row in rows:
            self._failed.discard(row)
            self._sampler.remove(row)

    def _add(self, news: tuple[NewRow, ...]) -> tuple[RowFailure, ...]:
        """A row that fails is placed all the same, with tokens the model knows: its share of the plan is computed, as
        others may read the blocks of a prompt it shares with them."""
        placed, failures = [], []
        for new in news:
            try:
                self._check_tokens(new.token_ids)
                self._sampler.add(new)
            except Exception as error:  # noqa: BLE001  this row's own code: only its request ends
                self._failed.add(new.row)
                failures.append(RowFailure(new.row, str(error) or type(error).__name__))
                new = replace(new, token_ids=new.token_ids.clip(0, self._vocab_size - 1))
            placed.append(new)
        self.rows.place(placed)
        return tuple(failures)

    def _check_tokens(self, token_ids: Ints) -> None:
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise InvalidRequest(
                "prompt", f"holds a token id outside [0, {self._vocab_size})", "tokenize it for this model"
            )
