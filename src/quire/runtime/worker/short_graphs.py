"""Captured graphs of steps in which each row computes a few tokens: drafts that are verified, and tokens that a draft
model has to catch up on.

Such a step runs like a decode step: each token is a line of the batch, which attends to the keys up to its position
through the block table of its row. So the keys of long contexts are split among thread blocks as in decoding, and one
graph launch runs the whole step, from token ids to sampled tokens. The host uploads the row and the position of each
token; it knows the lengths of all rows.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import row_buckets
from quire.runtime.layers.step import ForwardStep, WindowStep
from quire.runtime.models.build import Model
from quire.runtime.parallel.vocabulary import Vocabulary
from quire.runtime.sampling.samples import Longs
from quire.runtime.sampling.triton_choice import TritonChoice
from quire.runtime.worker.batch import find_spans, find_tokens, tables_of
from quire.runtime.worker.capture import Capture, Launch
from quire.runtime.worker.decode_forward import GraphAdapters
from quire.runtime.worker.decode_graphs import DecodeGraphs, GraphSampler
from quire.runtime.worker.device_batch import PADDING
from quire.runtime.worker.device_lists import NOTHING_LISTED
from quire.runtime.worker.device_parts import DeviceParts
from quire.runtime.worker.kind_graphs import KindGraphs
from quire.runtime.worker.runner import SampleStep, StepOutput
from quire.types.step import StepPlan

FEWEST, MOST = 8, 128  # tokens of the smallest and of the largest graph: steps smaller than FEWEST are not faster
SHORT = 8  # most known tokens of a chunk, drafts excluded; longer chunks use the prefill kernels
_BYTES_PER_TOKEN = 36  # uploaded per token
_BYTES_BESIDE = 1 << 10  # alignment


class ShortKind(NamedTuple):
    """The key of a graph: the bucket, and the properties of a step that select its kernels."""

    bucket: int  # tokens
    top_k_top_p: bool = False  # a row has top_k or top_p
    adapters: bool = False  # a row uses a LoRA adapter

    def in_bucket(self, bucket: int) -> ShortKind:
        """Return the kind of the same steps in a larger bucket."""
        return self._replace(bucket=bucket)


class _Tokens(NamedTuple):
    """The tokens of a step in plan order: decodes, then chunks."""

    rows: Longs  # [tokens]
    positions: Longs  # [tokens]
    wanted: Longs  # [samples]: indices of the tokens that are sampled from
    grown: Longs  # [grown]: indices of the tokens whose samples are appended to their rows


class _Given(NamedTuple):
    """The inputs of a graph: views of device memory at fixed addresses, written before each launch."""

    rows: Tensor  # [bucket], int32; negative: padding
    places: Tensor  # [bucket], int64: indices in the flattened token history
    positions: Tensor  # [bucket], int64
    lengths: Tensor  # [bucket], int64: keys that the token sees, including its own; 0: padding
    sampled: Tensor  # [bucket], int32: rows of tokens that are sampled from; negative: not sampled
    grown: Tensor  # [bucket], int32: rows that the sample is appended to; negative: not appended


class ShortGraphs:
    """Implements runner.Graphs for steps with short chunks. Owns the memory that the graphs read and write.

    The outputs of a step are overwritten by the next step. There are no such graphs for models with recurrent layers or
    images.
    """

    def __init__(
        self,
        model: Model,
        parts: DeviceParts,
        sampling: GraphSampler,
        choice: TritonChoice,
        capture: Capture,
        vocabulary: Vocabulary | None = None,
        *,
        most: int,  # tokens that attention has work lists for, and that can be sampled at once
    ) -> None:
        self._model, self._parts, self._rows, self._vocabulary = model, parts, parts.rows, vocabulary
        self._sampling, self._choice, self._capture = sampling, choice, capture
        self._tables = tables_of(parts.rows, parts.cache)
        whole = min(most, MOST) // FEWEST * FEWEST  # no graph of its own for the few tokens beyond
        self._buckets = tuple(bucket for bucket in row_buckets(whole) if bucket >= FEWEST)
        device = parts.rows.device
        largest = self._buckets[-1]
        self._memory = torch.empty(largest * _BYTES_PER_TOKEN + _BYTES_BESIDE, dtype=torch.uint8, device=device)
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._adapters = None if parts.adapters is None else GraphAdapters(parts.adapters, largest, device)
        self._graphs = KindGraphs("steps with short chunks", self._buckets, self._make)

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._buckets

    def takes(self, plan: StepPlan) -> bool:
        """Whether a graph can run the step: all its chunks are short, nothing changes logits before the token choice,
        and its rows report nothing besides tokens."""
        if not plan.chunks or plan.masks is not None or plan.guided or plan.num_tokens > self._buckets[-1]:
            return False
        if any(len(chunk.sample_rows) > 1 or chunk.num_known > SHORT for chunk in plan.chunks):
            return False
        rows = plan.sample_rows
        listed = self._sampling.num_listed(rows, guided=False)
        return listed == NOTHING_LISTED and self._sampling.only_chooses(rows)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute and sample the plan's tokens. Only enqueues, unless a graph must be captured."""
        tokens = self._tokens(plan)
        kind = self._graphs.kind_to_run(self._kind(plan, tokens))
        launch = self._graphs[kind]
        self._write(tokens, kind)
        self._choice.upload_parameters()
        launch()
        self._rows.lengths[tokens.rows[tokens.grown]] += 1
        found = self._token_ids[: len(tokens.rows)]
        if len(tokens.wanted) == len(found):
            return StepOutput(plan, found)
        lines = self._rows.upload(tokens.wanted)
        return StepOutput(plan, found.index_select(0, lines), lines=lines)

    def rehearse(self, kind: ShortKind) -> None:
        """Launch each kernel of a graph at least once, over padding only."""
        given = self._write(_NO_TOKENS, kind)
        self._launch(kind, given, layers=self._model.num_varied)

    def capture(self, bucket: int) -> None:
        """Capture steps of `bucket` tokens, if that has not been done."""
        self._graphs.capture(ShortKind(bucket))

    def _tokens(self, plan: StepPlan) -> _Tokens:
        decodes, spans = plan.decode_rows.astype(np.int64), find_spans(plan)
        rows, positions = find_tokens(decodes, self._rows.lengths, spans)
        wanted, grown = list(range(len(decodes))), list(range(len(decodes)))
        for chunk, (begin, _, count, _) in zip(plan.chunks, spans.tolist(), strict=True):
            if chunk.sample_rows:
                wanted += range(begin + count - chunk.num_sampled, begin + count)
                grown += [begin + count - 1] if chunk.num_sampled == 1 else []
        return _Tokens(rows, positions, np.array(wanted, dtype=np.int64), np.array(grown, dtype=np.int64))

    def _kind(self, plan: StepPlan, tokens: _Tokens) -> ShortKind:
        bucket = self._buckets[bisect_left(self._buckets, len(tokens.rows))]
        adapters = self._parts.adapters is not None and self._parts.adapters.are_used(tokens.rows)
        return ShortKind(bucket, self._choice.needs_top_k_top_p(plan.sample_rows), adapters)

    def _make(self, kind: ShortKind) -> Launch:
        """Capture over padding only, which changes no row."""
        given = self._write(_NO_TOKENS, kind)
        return self._capture.record(partial(self._launch, kind, given), partial(self.rehearse, kind))

    def _write(self, tokens: _Tokens, kind: ShortKind) -> _Given:
        """Upload the tokens of the next step. The addresses are the same for all steps of a bucket."""
        rows, bucket, count = self._rows, kind.bucket, len(tokens.rows)
        entries = np.full(bucket, PADDING, dtype=np.int32)
        entries[:count] = tokens.rows
        positions, lengths = np.zeros(bucket, dtype=np.int64), np.zeros(bucket, dtype=np.int64)
        positions[:count], lengths[:count] = tokens.positions, tokens.positions + 1
        sampled, grown = np.full_like(entries, PADDING), np.full_like(entries, PADDING)
        sampled[tokens.wanted], grown[tokens.grown] = tokens.rows[tokens.wanted], tokens.rows[tokens.grown]
        places = np.where(entries == PADDING, rows.spare, entries).astype(np.int64) * rows.capacity + positions
        if kind.adapters:
            assert self._adapters is not None
            self._adapters.write(entries[:count], bucket, rows.uploader)
        return _Given(*rows.uploader.upload(entries, places, positions, lengths, sampled, grown, into=self._memory))

    def _launch(self, kind: ShortKind, given: _Given, *, layers: int | None = None) -> None:
        """Run what a graph captures. With `layers`, only that many layers run: they launch the same kernels fewer
        times."""
        rows, attention, nothing = self._rows, self._parts.attention, given.positions[:0]
        token_ids = rows.tokens.view(-1).index_select(0, given.places)
        plan = attention.plan(given.rows, given.positions, given.lengths, rows.tables, None)
        step = ForwardStep(
            token_ids=token_ids,
            positions=given.positions,
            lengths=given.lengths,
            max_length=rows.capacity,
            slots=nothing,  # layers compute slots from the block tables
            caches=self._parts.cache.layers,
            attention=plan,
            backend=attention,
            num_layers=layers,
            windows=tuple(WindowStep(nothing, plan.over(tables)) for tables in self._tables[1:]),
            adapters=self._adapters.step(kind.bucket) if self._adapters is not None and kind.adapters else None,
        )
        logits = self._model.logits(self._model(step), None if step.adapters is None else step.adapters.wanted)
        self._choose(kind, logits, given)
        rows.append_on_device(given.grown, self._token_ids[: kind.bucket])

    def _choose(self, kind: ShortKind, logits: Tensor, given: _Given) -> None:
        token_ids, vocabulary = self._token_ids[: kind.bucket], self._vocabulary

        def choose(chosen: Tensor, rows: slice) -> None:
            sampled, lengths = given.sampled[rows], given.lengths[rows]
            self._choice.choose_into(chosen, logits, sampled, lengths, self._rows.history, top_k_top_p=kind.top_k_top_p)

        if vocabulary is None:
            choose(token_ids, slice(None))
        else:
            logits = vocabulary.of_rows(logits)
            vocabulary.choose_into(token_ids, choose)


_NOTHING: Longs = np.empty(0, dtype=np.int64)
_NO_TOKENS = _Tokens(_NOTHING, _NOTHING, _NOTHING, _NOTHING)


class AllGraphs:
    """The graphs of an engine with speculative decoding: DecodeGraphs for decode steps, ShortGraphs for steps with
    short chunks. Implements runner.Graphs."""

    def __init__(self, decode: DecodeGraphs, short: ShortGraphs) -> None:
        self.decode, self.short = decode, short

    def takes(self, plan: StepPlan) -> bool:
        return self.short.takes(plan) if plan.chunks else self.decode.takes(plan)

    def run(self, plan: StepPlan) -> StepOutput:
        return self.short.run(plan) if plan.chunks else self.decode.run(plan)

    def begin(self, plan: StepPlan) -> SampleStep:
        return self.decode.begin(plan)
