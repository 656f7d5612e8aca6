"""The worker: executes the engine's plans on one device, and owns all state there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from quire.config.engine import EngineConfig
from quire.config.model import ModelConfig
from quire.config.rank_model import rank_model
from quire.runtime.attention.backend import AttentionBackend
from quire.runtime.models.build import Model
from quire.runtime.parallel.group import ONE_RANK
from quire.runtime.parallel.ranks import ALONE, Ranks
from quire.runtime.parallel.vocabulary import Vocabulary
from quire.runtime.speculation.drafter import NO_DRAFTER, Drafter
from quire.runtime.tiers.tiers import NO_TIERS, Tiers
from quire.runtime.worker.adapters import RowAdapters
from quire.runtime.worker.cache import KVCache
from quire.runtime.worker.parts import make_parts
from quire.runtime.worker.runner import NoGraphs, RowSampler, Runner, SampleStep, StepOutput
from quire.runtime.worker.stage import AwaitedTokens, NoSampler, StageForward, StageRunner, StageStreams, make_link
from quire.runtime.worker.warmup import Task, WarmupLeft
from quire.types.adapters import NO_ADAPTER
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage
from quire.types.step import Ints, Masks, NewRow, RowFailure, RowTokens, StepPlan


@dataclass(frozen=True, slots=True)
class _BegunStep:
    """A guided step whose forward pass was launched and that waits for its masks."""

    step: int
    sample: SampleStep
    failures: tuple[RowFailure, ...]  # before sampling


class Worker:
    """Executes plans on one device. Owns the rows, the sampler's state and the KV memory (unless `cache` belongs to
    another worker). An executor creates one worker for each rank and calls it with the plans in the order in which the
    engine made them.

    `drafter` may be set to one that reads this worker's rows, and `tiers` to the ones of its cache.
    """

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        sampler: RowSampler,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        cache: KVCache | None = None,
        adapters: RowAdapters | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`model`, `backend` and `adapters` belong to this rank. `model_config` describes its stage, with the heads and
        sizes of all ranks of the stage."""
        self.ranks = ranks
        self._link = link = make_link(config, ranks)
        if link is not None and not link.is_last:
            sampler = NoSampler()
        vocabulary = None
        if ranks.tensor is not ONE_RANK:
            vocabulary = Vocabulary(model_config.head_vocab_size, ranks.tensor, model.draft_tokens)
        own = rank_model(model_config, ranks.place)
        parts = make_parts(model, backend, sampler, own, config, ranks, vocabulary, cache=cache, adapters=adapters)
        self.adapters = adapters
        self.rows, self.cache, self._graphs = parts.rows, parts.cache, parts.graphs
        self._states, self._images = parts.states, parts.images
        self._sampler, self._vocab_size, self._prepare = sampler, model_config.vocab_size, parts.prepare
        num_samples = config.scheduler.num_samples
        kind = Runner if link is None or link.is_last else StageRunner
        streams = None if link is None else StageStreams(model, link)
        forward = parts.forward if streams is None else StageForward(parts.forward, streams)
        self._runner = kind(model, self.rows, parts.batches, forward, sampler, vocabulary, num_samples, parts.images)
        self._awaited: AwaitedTokens | None = None  # tokens that another pipeline stage samples
        if link is not None and isinstance(self._runner, StageRunner):
            self._awaited = self._runner.awaited = AwaitedTokens(self.rows, link)
        if streams is not None and not isinstance(parts.graphs, NoGraphs):
            from quire.runtime.worker.stage_graphs import StageGraphs

            self._graphs = StageGraphs(parts.graphs, streams, self._awaited)
        self.drafter: Drafter = NO_DRAFTER
        self.tiers: Tiers = NO_TIERS
        self._failed: set[int] = set()  # live rows that failed when they were added or written
        self._begun: _BegunStep | None = None
        self._captures: deque[Task] = deque()  # graphs that `prepare` had no time to capture
        self._compilations: deque[Task] = deque()  # kernels that `prepare` had no time to compile

    @torch.inference_mode()
    def prepare(self, seconds: float) -> None:
        """Compile kernels and capture graphs for about `seconds`, so that the first requests need not wait for that.
        Changes no row and no block."""
        own = self._prepare(seconds)
        self.tiers.prepare()
        for rest in (own, self.drafter.prepare(seconds)):
            self._captures.extend(rest.captures)
            self._compilations.extend(rest.compilations)

    @torch.inference_mode()
    def prepare_more(self) -> bool:
        """Do one task of the warm-up that is left. May only be called while no step is in flight. Returns False if
        nothing is left."""
        for tasks in (self._captures, self._compilations):
            if tasks:
                tasks.popleft()()
                return True
        return False

    @torch.inference_mode()
    def compile_remaining(self) -> None:
        """Start all remaining compilations in the background, and drop the remaining captures. `prepare_more` has
        nothing left then."""
        for compile_later in self.take_warmup_left().compilations:
            compile_later()

    def take_warmup_left(self) -> WarmupLeft:
        """Return the warm-up that is left, and forget it: `prepare_more` has nothing left then."""
        rest = WarmupLeft(tuple(self._captures), tuple(self._compilations))
        self._captures.clear()
        self._compilations.clear()
        return rest

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Execute a plan that is not guided. On a GPU the step may still run when this returns."""
        self._check_order(plan, guided=False)
        failures = self._update(plan)
        if plan.num_tokens == 0:
            output = self._empty_output(plan, plan.masks)
        elif self._by_graph(plan):
            output = self._graphs.run(plan)
        else:
            output = self._runner.run(plan, frozenset(self._failed))
        return self._complete(output, failures)

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> None:
        """Execute a guided plan up to its logits. `supply_masks` must be called before any other plan."""
        self._check_order(plan, guided=True)
        failures = self._update(plan)
        if plan.num_tokens == 0:
            sample: SampleStep = partial(self._empty_output, plan)
        elif self._by_graph(plan):
            sample = self._graphs.begin(plan)
        else:
            sample = self._runner.begin(plan, frozenset(self._failed))
        self._begun = _BegunStep(plan.step, sample, failures)

    @torch.inference_mode()
    def supply_masks(self, masks: Masks | None) -> StepOutput:
        """Sample the guided plan that was begun last, under these masks. Samples without a mask are not constrained."""
        begun, self._begun = self._begun, None
        if begun is None:
            raise RuntimeError("masks were supplied, but no guided plan waits for any: begin one first")
        return self._complete(begun.sample(masks), begun.failures)

    def check(self) -> None:
        """Assert that all state is consistent. Waits for the device, and for tokens of other stages."""
        if self._awaited is not None:
            self._awaited.receive_all()
        self.rows.check()
        self.cache.check()
        if self._states is not None:
            self._states.check()
        if self._images is not None:
            self._images.check()
        if self.adapters is not None:
            self.adapters.check()
        self.tiers.check()
        assert all(self.rows.live[row] for row in self._failed)

    def _check_order(self, plan: StepPlan, *, guided: bool) -> None:
        if self._begun is not None:
            raise RuntimeError(
                f"step {plan.step} was launched while step {self._begun.step} waits for its masks: supply them first"
            )
        if plan.guided != guided:
            raise RuntimeError(f"step {plan.step}: guided plans are begun, all other plans are executed")
        if guided and plan.masks is not None:
            raise RuntimeError(f"step {plan.step} is guided and has masks: its masks must come with supply_masks")

    def _by_graph(self, plan: StepPlan) -> bool:
        if self._failed or (plan.chunks and (self._runner.pooled.works or self._runner.scored.asked)):
            return False
        return self._graphs.takes(plan)

    def _update(self, plan: StepPlan) -> tuple[RowFailure, ...]:
        """Apply the plan's changes to rows, adapters, states and blocks, before the forward pass. Returns the rows that
        failed."""
        if self._awaited is not None:
            self._awaited.receive_for(plan)
        self._release(plan.released)
        if plan.adapters:
            assert self.adapters is not None, "adapters for a worker without slots"
            self.adapters.put(plan.adapters)
        self.rows.assign_windows(plan.window_owners, plan.window_blocks)
        failures = self._add(plan.new_rows) if plan.new_rows else ()
        failures += self._write(plan.writes) if plan.writes else ()
        self.rows.grant(plan.grant_rows, plan.grant_slots, plan.grant_blocks)
        if self._states is not None:
            self._states.update(plan)
        self.tiers.submit(plan.transfers)
        self.cache.copy(plan.copies)
        if plan.copies:
            self.drafter.copy_blocks(plan.copies)
        return failures

    def _empty_output(self, plan: StepPlan, masks: Masks | None) -> StepOutput:  # noqa: ARG002
        """Return the output of a plan without tokens."""
        return StepOutput(plan, torch.empty(0, dtype=torch.int64, device=self.rows.device))

    def _complete(self, output: StepOutput, failures: tuple[RowFailure, ...]) -> StepOutput:
        """After sampling: send the tokens to the other stages, add the failures, and make drafts."""
        if self._link is not None and self._link.is_last:
            self._link.send_tokens(output.token_ids)
        if failures:
            output = replace(output, failures=failures + output.failures)
        if self.drafter is NO_DRAFTER:
            return output
        return replace(output, drafts=self.drafter.follow(output.plan, output.token_ids))

    def forget_images(self) -> None:
        """Forget what the vision tower has computed, because its weights change."""
        if self._images is not None:
            self._images.forget_vectors()

    def _release(self, rows: tuple[int, ...]) -> None:
        self.rows.release(rows)
        if self._images is not None:
            self._images.release(rows)
        self._failed.difference_update(rows)
        if self._runner.pooled.works:
            self._runner.pooled.remove(rows)
        if self._runner.scored.asked:
            self._runner.scored.remove(rows)
        for row in rows:
            self._sampler.remove(row)

    def _add(self, news: tuple[NewRow, ...]) -> tuple[RowFailure, ...]:
        """Add new rows. Returns those that failed. A failed row is placed too, without its invalid tokens and images,
        and without an adapter that its slot does not hold: its tokens are still computed, as other rows may read the
        blocks of a prompt that they share with it."""
        placed, failures, known = [], [], self._are_known(news)
        for new in news:
            try:
                if not known:
                    self._check_tokens(new.token_ids)
                self._check_images(new.images)
                self._check_adapter(new.adapter)
                self._sampler.add(new)
            except Exception as error:  # noqa: BLE001 - contain the fault: only this request ends
                self._failed.add(new.row)
                failures.append(RowFailure(new.row, str(error) or type(error).__name__))
                tokens, images = new.token_ids.clip(0, self._vocab_size - 1), tuple(self._valid_images(new.images))
                new = new._replace(token_ids=tokens, images=images, adapter=self._usable_adapter(new.adapter))
            placed.append(new)
        self.rows.place(placed)
        if self._images is not None:
            self._images.place(placed)
        if self.adapters is not None:
            self.adapters.place(placed)
        if any(new.pools is not None for new in news):
            self._runner.pooled.add(news)
        if any(new.sampling.prompt_logprobs is not None for new in news):
            self._runner.scored.add(news)
        return tuple(failures)

    def _write(self, writes: tuple[RowTokens, ...]) -> tuple[RowFailure, ...]:
        """Write tokens to rows. A row with a token that the model does not know fails; the others are not affected."""
        written, failures, known = list(writes), [], self._are_known(writes)
        for place, write in enumerate(() if known else writes):
            try:
                self._check_tokens(write.token_ids)
            except InvalidRequest as error:
                self._failed.add(write.row)
                failures.append(RowFailure(write.row, str(error)))
                written[place] = write._replace(token_ids=write.token_ids.clip(0, self._vocab_size - 1))
        self.rows.write(written)
        return tuple(failures)

    def _are_known(self, lines: Sequence[NewRow | RowTokens]) -> bool:
        """Whether all tokens of all these rows are in the model's vocabulary."""
        tokens = np.concatenate([line.token_ids for line in lines])
        return len(tokens) == 0 or bool(tokens.min() >= 0 and tokens.max() < self._vocab_size)

    def _check_adapter(self, slot: int) -> None:
        if slot == NO_ADAPTER:
            return
        if self.adapters is None:
            raise InvalidRequest(
                "model", "names a LoRA adapter, and this worker has no slots for adapters", "leave it out"
            )
        self.adapters.check_slot(slot)

    def _usable_adapter(self, slot: int) -> int:
        """Return `slot`, or NO_ADAPTER if the slot's adapter could not be loaded."""
        with suppress(InvalidRequest):
            self._check_adapter(slot)
            return slot
        return NO_ADAPTER

    def _check_images(self, images: tuple[PromptImage, ...]) -> None:
        if self._images is not None:
            for image in images:
                self._images.check_image(image)

    def _valid_images(self, images: tuple[PromptImage, ...]) -> Iterator[PromptImage]:
        """Yield the images before the first one that fails its check."""
        with suppress(InvalidRequest):
            for image in images:
                self._check_images((image,))
                yield image

    def _check_tokens(self, token_ids: Ints) -> None:
        if token_ids.min(initial=0) < 0 or token_ids.max(initial=0) >= self._vocab_size:
            raise InvalidRequest(
                "prompt", f"holds a token id outside [0, {self._vocab_size})", "tokenize it for this model"
            )
