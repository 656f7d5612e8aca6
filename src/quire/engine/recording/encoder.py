"""Converts the events of an engine to records. A record is one JSON object."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from hashlib import blake2b
from typing import Any

import numpy as np

from quire.engine.recording.events import (
    Aborted,
    AdapterLoaded,
    AdapterUnloaded,
    CacheReset,
    Collected,
    Event,
    GrammarResult,
    Launched,
    StepPart,
    Stepped,
    Submitted,
    TransfersReported,
    Unpinned,
)
from quire.engine.recording.plans import Record, plan_record
from quire.engine.recording.rows import BeamRows, Longs, RowTracker, SampledTokens
from quire.engine.recording.tokens import ExactTokens, TokenEncoding
from quire.types.output import Finished
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.transfer import NOTHING_MOVED, TransferReport

_DEFAULTS = {item.name: item.default for item in fields(SamplingParams) if item.default is not MISSING}
_REVEALING = (  # sampling fields that show text or tokens
    "stop",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "logprob_token_ids",
    "structured_outputs",
    "extra",
)


def path_digest(tokens: list[int]) -> str:
    """Return the digest by which a recording refers to the tokens that a sample has generated."""
    return blake2b(np.array(tokens, dtype="<i4").tobytes(), digest_size=8).hexdigest()


class EventEncoder:
    """Encodes the events of one engine in order. Generated tokens are collected until `take_tokens`."""

    def __init__(self, num_rows: int, encoding: TokenEncoding) -> None:
        self._encoding, self._rows = encoding, RowTracker(num_rows)
        self._in_flight: deque[tuple[SampledTokens, tuple[BeamRows, ...]]] = deque()
        self._plans: list[Record] = []  # of the current step
        self._reports: list[Record] = []  # of the current step
        self._tokens: list[Longs] = []  # [4, samples]: ordinals, indices, places, tokens
        self._searching: set[int] = set()  # requests that are beam searches
        self._aliases: dict[str, str] = {"": ""}  # of salts, tenants and adapters

    def encode(self, event: Event) -> list[Record]:
        """Return the records of the next event."""
        if isinstance(event, Stepped):
            parts = [record for part in event.parts for record in self._part(part)]
            return [*parts, *self._step(event)]
        if isinstance(event, Submitted):
            return [self._submit(event)]
        if isinstance(event, CacheReset):
            return [{"is": "reset_cache", "clock": event.clock}]
        if isinstance(event, Unpinned):
            return [{"is": "unpin", "salt": self._alias(event.salt), "name": event.name, "clock": event.clock}]
        if isinstance(event, AdapterLoaded):
            info = event.info
            known = {"digest": info.digest, "rank": info.rank, "bytes": info.num_bytes}
            return [{"is": "adapter", "name": self._alias(info.name), **known, "clock": event.clock}]
        if isinstance(event, AdapterUnloaded):
            return [{"is": "no adapter", "name": self._alias(event.name), "clock": event.clock}]
        return [self._abort(event)]

    def _part(self, part: StepPart) -> list[Record]:
        """Return the records that come before the record of the step itself."""
        if isinstance(part, Launched):
            self._in_flight.append((self._rows.apply(part.plan, part.owners), part.searches))
            self._plans.append(plan_record(part.plan, self._rows))
        elif isinstance(part, Collected):
            return self._collect(part)
        elif isinstance(part, TransfersReported):
            self._reports.append(_report(part.report))
        else:
            return [self._grammar(part)]
        return []

    def take_tokens(self) -> Iterator[Record]:
        """Yield the tokens generated since the last call, by sample. If a place comes twice, the later token counts."""
        if not self._tokens:
            return
        tokens, self._tokens = np.concatenate(self._tokens, axis=1), []
        tokens = tokens[:, np.lexsort((tokens[1], tokens[0]))]
        if not tokens.shape[1]:
            return
        ordinals, indices, places, _ = tokens
        follows = (np.diff(ordinals) == 0) & (np.diff(indices) == 0) & (np.diff(places) == 1)
        for run in np.split(tokens, np.flatnonzero(~follows) + 1, axis=1):
            ordinal, index, place = (int(value) for value in run[:3, 0])
            if ids := self._encoding.outputs(ordinal, index, place, run[3].tolist()):
                yield {"is": "tokens", "of": [ordinal, index], "at": place, "ids": ids}

    # ------------------------------------------------------------------------------------------------- requests
    def _submit(self, event: Submitted) -> Record:
        request, ordinal = event.request, event.ordinal
        if request.beam is not None:
            self._searching.add(ordinal)
        prompt = self._encoding.prompt(ordinal, request.cache_salt, request.prompt_token_ids, request.rules.end_ids)
        record: Record = {"is": "submit", "of": ordinal, "id": request.request_id, "prompt": prompt}
        record["sampling"], record["rules"] = self._sampling(request)
        record["texts"] = [name for name, is_set in _text_endings(request).items() if is_set]
        record["salt"], record["tenant"] = self._alias(request.cache_salt), self._alias(request.tenant)
        optional = {"priority": request.priority, "beam": request.beam, "source": request.source, "pin": request.pin}
        optional["adapter"] = self._alias(request.adapter)
        record |= {name: _plain(value) for name, value in optional.items() if value}
        record["clock"] = event.clock
        return record

    def _sampling(self, request: Submit) -> tuple[Record, Record]:
        """Return the sampling fields that differ from their defaults, and the token rules. If tokens are hashed, fields
        that reveal text or tokens are left out."""
        exact = isinstance(self._encoding, ExactTokens)
        values = ((name, getattr(request.sampling, name), default) for name, default in _DEFAULTS.items())
        sampling = {name: _plain(value) for name, value, default in values if value != default}
        rules: Record = {"end_ids": request.rules.end_ids, "eos_ids": request.rules.eos_ids}
        if exact:
            return sampling, rules | {"bad_words": request.rules.bad_words, "grammar": request.rules.grammar}
        return {name: value for name, value in sampling.items() if name not in _REVEALING}, rules

    def _alias(self, value: str) -> str:
        """Return a salt, a tenant or an adapter name. If tokens are hashed, return a number instead, the same for equal
        values."""
        if isinstance(self._encoding, ExactTokens):
            return value
        return self._aliases.setdefault(value, f"{len(self._aliases)}")

    def _abort(self, event: Aborted) -> Record:
        abort = event.abort
        is_stop = abort.stop_reason is not None
        record: Record = {"is": "abort", "of": event.ordinal, "index": abort.index, "stop": is_stop}
        return record | {"tokens": event.num_tokens, "clock": event.clock}

    def _grammar(self, result: GrammarResult) -> Record:
        record: Record = {
            "is": "grammar",
            "of": result.ordinal,
            "path": path_digest(self._path(result.ordinal, result.path)),
        }
        if result.is_over:
            record["over"] = True
        if result.forced:
            record["forced"] = self._path(result.ordinal, (*result.path, *result.forced))[len(result.path) :]
        if result.fault:
            record["fault"] = result.fault
        if result.refused is not None:
            record["refused"] = self._path(result.ordinal, (*result.path, result.refused))[-1]
        return record

    def _path(self, ordinal: int, tokens: tuple[int, ...]) -> list[int]:
        if ordinal not in self._searching:
            return self._encoding.path(ordinal, tokens)
        return [self._encoding.candidates(ordinal, place, [token])[0] for place, token in enumerate(tokens)]

    # ---------------------------------------------------------------------------------------------------- steps
    def _collect(self, item: Collected) -> list[Record]:
        samples, searches = self._in_flight.popleft()
        plain = ~np.isin(samples.ordinals, list(self._searching)) if self._searching else slice(None)
        self._tokens.append(np.stack([*(each[plain] for each in samples[1:]), item.token_ids[plain]]))
        records = [self._beams(search, samples, item) for search in searches]
        for failure in item.failures:
            records.append({"is": "failure", **self._where(samples, failure.row), "reason": failure.reason})
        for draft in item.drafts:
            records.append({"is": "draft", **self._where(samples, draft.row), "ids": draft.token_ids.tolist()})
        if item.logprobs:
            records.append(_logprobs(samples, item))
        return records

    def _where(self, samples: SampledTokens, row: int) -> Record:
        """Return the sample of a row and the first place that the step sampled for it (-1: none)."""
        places = samples.places[samples.rows == row]
        of = [int(self._rows.ordinals[row]), int(self._rows.indices[row])]
        return {"of": of, "at": int(places.min()) if len(places) else -1}

    def _beams(self, search: BeamRows, samples: SampledTokens, item: Collected) -> Record:
        """Return the record of the most likely next tokens of all beams, in the order of the beams."""
        assert item.candidates is not None
        places = [int(np.flatnonzero(samples.rows == row)[0]) for row in search.rows]
        lines = {place: line for line, place in enumerate(item.candidates.samples.tolist())}
        found = [lines[place] for place in places]
        place, ordinal = int(samples.places[places[0]]), search.ordinal
        ids = item.candidates.token_ids[found, : search.num_candidates]
        scores = item.candidates.scores[found, : search.num_candidates]
        return {
            "is": "beams",
            "of": ordinal,
            "at": place,
            "sampled": self._encoding.candidates(ordinal, place, item.token_ids[places].tolist()),
            "ids": [self._encoding.candidates(ordinal, place, line) for line in ids.tolist()],
            "scores": [[None if score == -np.inf else score for score in line] for line in scores.tolist()],
        }

    def _step(self, event: Stepped) -> list[Record]:
        record: Record = {"is": "step", "plans": self._plans, "took": [round(each, 6) for each in event.seconds]}
        self._plans = []
        if event.compiled:
            record["compiled"] = event.compiled
        if event.fetched:
            record["fetched"] = event.fetched
        if any(self._reports):
            record["reports"] = self._reports
        self._reports = []
        record |= {"used": event.num_used, "running": event.num_running, "waiting": event.num_waiting}
        record |= {"preempted": event.num_preempted, "swapped": event.num_swapped}
        record["clock"] = event.clock
        records = [record, *(self._end(ordinal, message) for ordinal, message in event.finished)]
        return [*records, {"is": "dead", "reason": event.dead}] if event.dead is not None else records

    def _end(self, ordinal: int, message: Finished) -> Record:
        return {
            "is": "end",
            "of": ordinal,
            "reasons": [sample.finish_reason for sample in message.samples],
            "lengths": [len(sample.token_ids) for sample in message.samples],
            "error": message.error,
            "cached": message.num_cached_tokens,
            "preempted": message.num_preemptions,
            "ledger": [[entry.kind, entry.at, entry.amount, entry.note] for entry in message.ledger],
        }

    def forget(self, records: list[Record]) -> None:
        """Drop the state of the requests that these records end. Call it once their tokens are written."""
        for record in records:
            if record["is"] == "end":
                self._encoding.forget(record["of"])
                self._searching.discard(record["of"])


def _text_endings(request: Submit) -> dict[str, bool]:
    """Return whether a grammar or stop strings can end a request's samples inside the engine. A replay has no text and
    cannot evaluate them."""
    is_ranked = request.beam is not None or request.sampling.num_sequences > request.sampling.n
    return {"grammar": bool(request.rules.grammar), "stop": bool(is_ranked and request.sampling.stops)}


def _logprobs(samples: SampledTokens, item: Collected) -> Record:
    """Return the record of the sampled tokens' logprobs. Those of a row are in the order of its samples."""
    of: list[list[int]] = []
    next_of: dict[int, int] = {}
    for entry in item.logprobs:
        (found,) = np.nonzero(samples.rows == entry.row)
        place = next_of.get(entry.row, 0)
        next_of[entry.row] = place + 1
        sample = int(found[place])
        of.append([int(samples.ordinals[sample]), int(samples.indices[sample]), int(samples.places[sample])])
    values = [float(entry.entry.logprobs[0]) for entry in item.logprobs]
    return {"is": "logprobs", "of": of, "values": [None if value == -np.inf else value for value in values]}


def _report(report: TransferReport) -> Record:
    return {} if report == NOTHING_MOVED else {name: _plain(value) for name, value in asdict(report).items() if value}


def _plain(value: Any) -> Any:
    """Convert a value to types that JSON can hold."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return _plain({name: each for name, each in asdict(value).items() if each is not None})
    return value
