"""Puts into records what the engine's thread hands over. One record is one JSON object."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from hashlib import blake2b
from typing import Any

import numpy as np

from quire.engine.recording.items import (
    Aborted,
    CacheReset,
    Collected,
    GrammarNote,
    Item,
    Launched,
    Moved,
    Stepped,
    Submitted,
    Unpinned,
)
from quire.engine.recording.plans import Record, plan_record
from quire.engine.recording.rows import Longs, RowMirror, Samples, Search
from quire.engine.recording.tokens import ExactTokens, TokenNames
from quire.types.output import Finished
from quire.types.request import Submit
from quire.types.sampling import SamplingParams
from quire.types.transfer import NOTHING_MOVED, TransferReport

_DEFAULTS = {item.name: item.default for item in fields(SamplingParams) if item.default is not MISSING}
_WORDS = ("stop", "bad_words", "allowed_token_ids", "logit_bias", "logprob_token_ids", "structured_outputs")


def path_digest(tokens: list[int]) -> str:
    """How a recording names what a sample has generated."""
    return blake2b(np.array(tokens, dtype="<i4").tobytes(), digest_size=8).hexdigest()


class Scribe:
    """Follows the engine. Records come in order; generated tokens are gathered and come when asked for."""

    def __init__(self, num_rows: int, names: TokenNames) -> None:
        self._names, self._rows = names, RowMirror(num_rows)
        self._flights: deque[tuple[Samples, tuple[Search, ...]]] = deque()
        self._plans: list[Record] = []  # of the step in work, as are these
        self._reports: list[Record] = []
        self._gathered: list[Longs] = []  # [4, samples]: ordinals, indices, places, tokens
        self._searching: set[int] = set()
        self._aliases: dict[str, str] = {"": ""}  # of salts and tenants

    def write(self, item: Item) -> list[Record]:
        """The records of what happened next."""
        if isinstance(item, Stepped):
            said = [record for each in item.happened for record in self._happen(each)]
            return [*said, *self._step(item)]
        if isinstance(item, Submitted):
            return [self._submit(item)]
        if isinstance(item, CacheReset):
            return [{"is": "reset_cache", "clock": item.clock}]
        if isinstance(item, Unpinned):
            return [{"is": "unpin", "salt": self._secret(item.salt), "name": item.name, "clock": item.clock}]
        return [self._abort(item)]

    def _happen(self, item: Launched | Collected | Moved | GrammarNote) -> list[Record]:
        """What is told of a part of a step before the step itself."""
        if isinstance(item, Launched):
            self._flights.append((self._rows.follow(item.plan, item.seats), item.searches))
            self._plans.append(plan_record(item.plan, self._rows))
        elif isinstance(item, Collected):
            return self._collect(item)
        elif isinstance(item, Moved):
            self._reports.append(_report(item.report))
        else:
            return [self._grammar(item)]
        return []

    def tokens(self) -> Iterator[Record]:
        """What was generated since the last call, by sample. Places may come again: the last word counts."""
        if not self._gathered:
            return
        gathered, self._gathered = np.concatenate(self._gathered, axis=1), []
        gathered = gathered[:, np.lexsort((gathered[1], gathered[0]))]
        if not gathered.shape[1]:
            return
        ordinals, indices, places, _ = gathered
        follows = (np.diff(ordinals) == 0) & (np.diff(indices) == 0) & (np.diff(places) == 1)
        for run in np.split(gathered, np.flatnonzero(~follows) + 1, axis=1):
            ordinal, index, place = (int(value) for value in run[:3, 0])
            if ids := self._names.outputs(ordinal, index, place, run[3].tolist()):
                yield {"is": "tokens", "of": [ordinal, index], "at": place, "ids": ids}

    # ------------------------------------------------------------------------------------------------- requests
    def _submit(self, item: Submitted) -> Record:
        request, ordinal = item.request, item.ordinal
        if request.beam is not None:
            self._searching.add(ordinal)
        prompt = self._names.prompt(ordinal, request.cache_salt, request.prompt_token_ids, request.rules.end_ids)
        record: Record = {"is": "submit", "of": ordinal, "id": request.request_id, "prompt": prompt}
        record["sampling"], record["rules"] = self._wishes(request)
        record["texts"] = [name for name, is_set in _endings_by_text(request).items() if is_set]
        record["salt"], record["tenant"] = self._secret(request.cache_salt), self._secret(request.tenant)
        optional = {"priority": request.priority, "beam": request.beam, "source": request.source, "pin": request.pin}
        record |= {name: _plain(value) for name, value in optional.items() if value}
        record["clock"] = item.clock
        return record

    def _wishes(self, request: Submit) -> tuple[Record, Record]:
        """Sampling as the fields that differ from their defaults, and the rules; where tokens are hashed, no words."""
        exact = isinstance(self._names, ExactTokens)
        values = ((name, getattr(request.sampling, name), default) for name, default in _DEFAULTS.items())
        sampling = {name: _plain(value) for name, value, default in values if value != default}
        rules: Record = {"end_ids": request.rules.end_ids, "eos_ids": request.rules.eos_ids}
        if exact:
            return sampling, rules | {"bad_words": request.rules.bad_words, "grammar": request.rules.grammar}
        return {name: value for name, value in sampling.items() if name not in _WORDS}, rules

    def _secret(self, value: str) -> str:
        """A salt or a tenant; where tokens are hashed, only which are the same."""
        if isinstance(self._names, ExactTokens):
            return value
        return self._aliases.setdefault(value, f"{len(self._aliases)}")

    def _abort(self, item: Aborted) -> Record:
        abort = item.abort
        is_stop = abort.stop_reason is not None
        record: Record = {"is": "abort", "of": item.ordinal, "index": abort.index, "stop": is_stop}
        return record | {"tokens": item.num_tokens, "clock": item.clock}

    def _grammar(self, note: GrammarNote) -> Record:
        record: Record = {"is": "grammar", "of": note.ordinal, "path": path_digest(self._path(note.ordinal, note.path))}
        if note.is_over:
            record["over"] = True
        if note.forced:
            record["forced"] = self._path(note.ordinal, (*note.path, *note.forced))[len(note.path) :]
        if note.fault:
            record["fault"] = note.fault
        if note.refused is not None:
            record["refused"] = self._path(note.ordinal, (*note.path, note.refused))[-1]
        return record

    def _path(self, ordinal: int, tokens: tuple[int, ...]) -> list[int]:
        if ordinal not in self._searching:
            return self._names.path(ordinal, tokens)
        return [self._names.candidates(ordinal, place, [token])[0] for place, token in enumerate(tokens)]

    # ---------------------------------------------------------------------------------------------------- steps
    def _collect(self, item: Collected) -> list[Record]:
        samples, searches = self._flights.popleft()
        plain = ~np.isin(samples.ordinals, list(self._searching)) if self._searching else slice(None)
        self._gathered.append(np.stack([*(each[plain] for each in samples[1:]), item.token_ids[plain]]))
        records = [self._beams(search, samples, item) for search in searches]
        for failure in item.failures:
            records.append({"is": "failure", **self._where(samples, failure.row), "reason": failure.reason})
        for draft in item.drafts:
            records.append({"is": "draft", **self._where(samples, draft.row), "ids": draft.token_ids.tolist()})
        if item.logprobs:
            records.append(_logprobs(samples, item))
        return records

    def _where(self, samples: Samples, row: int) -> Record:
        """A row's sample and the first place it sampled in the step; -1: nowhere."""
        places = samples.places[samples.rows == row]
        of = [int(self._rows.ordinals[row]), int(self._rows.indices[row])]
        return {"of": of, "at": int(places.min()) if len(places) else -1}

    def _beams(self, search: Search, samples: Samples, item: Collected) -> Record:
        """The likeliest next tokens of all beams of a search, in the beams' order."""
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
            "sampled": self._names.candidates(ordinal, place, item.token_ids[places].tolist()),
            "ids": [self._names.candidates(ordinal, place, line) for line in ids.tolist()],
            "scores": [[None if score == -np.inf else score for score in line] for line in scores.tolist()],
        }

    def _step(self, item: Stepped) -> list[Record]:
        record: Record = {"is": "step", "plans": self._plans, "took": [round(each, 6) for each in item.took]}
        self._plans = []
        if item.compiled:
            record["compiled"] = item.compiled
        if any(self._reports):
            record["reports"] = self._reports
        self._reports = []
        record |= {"used": item.num_used, "running": item.num_running, "waiting": item.num_waiting}
        record |= {"preempted": item.num_preempted, "swapped": item.num_swapped}
        record["clock"] = item.clock
        records = [record, *(self._end(ordinal, message) for ordinal, message in item.finished)]
        return [*records, {"is": "dead", "reason": item.dead}] if item.dead is not None else records

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
        """The requests that these records end need no names any more; to be called once their tokens are written."""
        for record in records:
            if record["is"] == "end":
                self._names.forget(record["of"])
                self._searching.discard(record["of"])


def _endings_by_text(request: Submit) -> dict[str, bool]:
    """What ends its samples inside the engine besides tokens and lengths: a replay has no text to look at."""
    is_ranked = request.beam is not None or request.sampling.num_sequences > request.sampling.n
    return {"grammar": bool(request.rules.grammar), "stop": bool(is_ranked and request.sampling.stops)}


def _logprobs(samples: Samples, item: Collected) -> Record:
    """The chosen tokens' logprobs; those of a row come in the order of its samples."""
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
    """A value as JSON has it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return _plain({name: each for name, each in asdict(value).items() if each is not None})
    return value
