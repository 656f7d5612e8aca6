"""Reads the file of a recording. An incomplete last line is ignored; any other damage is an error that names its
line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.speculation import SpeculationConfig
from quire.engine.recording.encoder import path_digest
from quire.engine.recording.writer import FORMAT
from quire.simulator.model_outputs import BeamCandidates, Failure
from quire.simulator.recording import (
    Aborted,
    AdapterLoaded,
    AdapterUnloaded,
    CacheReset,
    Ended,
    Recording,
    RecordingError,
    Setup,
    Stepped,
    Submitted,
    Unpinned,
)
from quire.types.adapters import AdapterInfo
from quire.types.decoding import BeamRules
from quire.types.errors import QuireError
from quire.types.ledger import LedgerEntry
from quire.types.request import Branch, Submit, pack_tokens
from quire.types.sampling import SamplingParams, TokenRules
from quire.types.transfer import FailedFile, FoundFile, TransferReport

MAX_LINE = 512 * 2**20  # bytes of one record
_TEXTS = ("stop", "structured_outputs", "bad_words")  # sampling fields that a replay ignores, as it has no text

Record = dict[str, Any]
T = TypeVar("T")


def read_recording(path: Path) -> Recording:
    """Read a whole file. Raises RecordingError."""
    lines = _lines(path)
    number, first = next(lines, (1, None))
    if first is None or first.get("is") != "quire recording":
        raise RecordingError(f"{path} is no recording; make one with --record FILE")
    if first.get("format") != FORMAT:
        made = f"format {first.get('format')}, made by quire {first.get('quire')}"
        raise RecordingError(f"{path} has {made}; this version reads format {FORMAT}")
    reader = _Reader(_checked(path, number, lambda: _setup(first)))
    for number, record in lines:
        _checked(path, number, lambda record=record: reader.read(record))  # type: ignore[misc]
    return _checked(path, number, reader.finish)


def _checked(path: Path, number: int, read: Callable[[], T]) -> T:
    """Call `read`, and convert its errors to a RecordingError that names the line."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, QuireError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise RecordingError(f"{path}, line {number}: not a record of format {FORMAT}: {what}") from None


def _lines(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                if not line.endswith(b"\n"):
                    if len(line) == MAX_LINE:
                        raise RecordingError(f"{path}, line {number}: is above {MAX_LINE} bytes")
                    return  # the writer was interrupted
                yield number, _parse(path, number, line)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None


def _parse(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if number == 1:
            raise RecordingError(f"{path} is no recording; make one with --record FILE") from None
        raise RecordingError(f"{path}, line {number}: damaged: {error}") from None
    if not isinstance(record, dict):
        raise RecordingError(f"{path}, line {number}: is no object")
    return record


class _Reader:
    """Builds a Recording from its records, in order."""

    def __init__(self, setup: Setup) -> None:
        self._recording = Recording(setup)
        self._at = 0.0  # the last reading of the clock
        self._requests: dict[int, Submitted] = {}
        self._readers: dict[str, Callable[[Record], None]] = {
            "submit": self._submit,
            "abort": self._abort,
            "step": self._step,
            "tokens": self._tokens,
            "end": self._end,
            "beams": self._beams,
            "logprobs": self._logprobs,
            "grammar": self._grammar,
            "draft": self._draft,
            "failure": self._failure,
            "reset_cache": lambda record: self._recording.events.append(CacheReset(*self._time(record))),
            "unpin": self._unpin,
            "adapter": self._load_adapter,
            "no adapter": self._unload_adapter,
            "dead": self._dead,
            "over": self._over,
        }

    def read(self, record: Record) -> None:
        kind = record["is"]
        if kind not in self._readers:
            raise ValueError(f"{kind!r} is unknown")
        if self._recording.end_reason is not None:
            raise ValueError("it comes after the end")
        self._readers[kind](record)

    def finish(self) -> Recording:
        """Return the recording. A sample that the engine ended at a stop string is made to end where its recorded
        tokens end."""
        recording = self._recording
        for ordinal, submitted in self._requests.items():
            end = recording.ends.get(ordinal)
            if submitted.ends_by_text and end is not None and end.error is None and "abort" not in end.reasons:
                outputs = [ids for (owner, _), ids in recording.outputs.tokens.items() if owner == ordinal]
                longest = max(map(len, outputs), default=0)
                most = self._most_tokens(submitted.request) if "length" in end.reasons else longest + 1
                recording.outputs.grammars[ordinal].over |= {path_digest(ids) for ids in outputs if len(ids) < most}
                if ("stop", most) in zip(end.reasons, end.lengths, strict=True):
                    reason = "a stop string ended a sample at its last token, and the recording does not say which"
                    recording.inexact.append(f"request {submitted.request.request_id}: {reason}")
        return recording

    def _most_tokens(self, request: Submit) -> int:
        """Return how many tokens a sample of the request may generate."""
        room = self._recording.setup.scheduler.max_model_len - len(request.prompt_token_ids)
        return min(request.sampling.max_tokens or room, room)

    def _time(self, record: Record) -> tuple[float, tuple[float, ...]]:
        """Return the time of an event and all readings of the clock during it."""
        clock = tuple(float(reading) for reading in record["clock"])
        if not all(before <= after < inf for before, after in pairwise((self._at, *clock))):
            raise ValueError("a clock that went back")
        at = clock[0] if clock else self._at
        self._at = clock[-1] if clock else self._at
        return at, clock

    # ------------------------------------------------------------------------------------------------- inputs
    def _submit(self, record: Record) -> None:
        at, clock = self._time(record)
        ordinal, texts = int(record["of"]), record["texts"]
        rules = TokenRules(
            end_ids=_token_ids(record["rules"]["end_ids"]),
            eos_ids=_token_ids(record["rules"]["eos_ids"]),
            grammar=str(ordinal) if texts else "",
        )
        sampling = {name: value for name, value in record["sampling"].items() if name not in _TEXTS}
        beam, source = record.get("beam"), record.get("source")
        request = Submit(
            request_id=str(record["id"]),
            prompt_token_ids=pack_tokens(_token_ids(record["prompt"])),
            sampling=SamplingParams(**sampling),
            rules=rules,
            priority=record.get("priority", 0),
            cache_salt=record["salt"],
            beam=None if beam is None else from_json(BeamRules, beam),
            source=None if source is None else from_json(Branch, source),
            tenant=record["tenant"],
            pin=record.get("pin", ""),
            adapter=record.get("adapter", ""),
        )
        by_stop = "stop" in texts
        self._note_inexact(request, texts)
        self._recording.outputs.set_end_ids(ordinal, rules.end_ids)
        submitted = Submitted(at, clock, ordinal, request, by_stop and beam is None)
        self._requests[ordinal] = submitted
        self._recording.events.append(submitted)

    def _note_inexact(self, request: Submit, texts: list[str]) -> None:
        if "stop" in texts and request.beam is not None:
            reason = "stop strings end its beams, and a recording holds no text"
        elif "grammar" in texts and self._recording.setup.tokens == "hashed":
            reason = "hashed tokens do not show what its grammar forces"
        else:
            return
        self._recording.inexact.append(f"request {request.request_id}: {reason}")

    def _abort(self, record: Record) -> None:
        index, stop, count = record["index"], bool(record["stop"]), int(record["tokens"])
        ordinal = self._requests[int(record["of"])].ordinal
        index = None if index is None else int(index)
        self._recording.events.append(Aborted(*self._time(record), ordinal, index, stop, count))

    def _unpin(self, record: Record) -> None:
        self._recording.events.append(Unpinned(*self._time(record), record["salt"], record["name"]))

    def _load_adapter(self, record: Record) -> None:
        info = AdapterInfo(record["name"], record["digest"], int(record["rank"]), int(record["bytes"]), "")
        self._recording.events.append(AdapterLoaded(*self._time(record), info))

    def _unload_adapter(self, record: Record) -> None:
        self._recording.events.append(AdapterUnloaded(*self._time(record), record["name"]))

    # ---------------------------------------------------------------------------------------- decisions
    def _step(self, record: Record) -> None:
        plans = tuple(record["plans"])
        for plan in plans:
            if not isinstance(plan["digest"], str) or not isinstance(plan["decode"], int):
                raise ValueError("a plan without digest and decode")
        self._recording.events.append(
            Stepped(
                *self._time(record),
                plans,
                tuple(float(each) for each in record["took"]),
                tuple(record.get("compiled", ())),
                tuple((str(digest), bool(was_read)) for digest, was_read in record.get("fetched", ())),
                tuple(_report(each) for each in record.get("reports", ())),
                *(int(record[name]) for name in ("used", "running", "waiting", "preempted", "swapped")),
            )
        )

    def _end(self, record: Record) -> None:
        ledger = tuple(LedgerEntry(*entry) for entry in record["ledger"])
        self._recording.ends[int(record["of"])] = Ended(
            tuple(record["reasons"]),
            tuple(record["lengths"]),
            record["error"],
            int(record["cached"]),
            int(record["preempted"]),
            ledger,
        )

    def _dead(self, record: Record) -> None:
        recording = self._recording
        if recording.fatal is None:
            recording.dead, recording.fatal = str(record["reason"]), len(recording.events) - 1

    def _over(self, record: Record) -> None:
        self._recording.end_reason = str(record["reason"])

    # ----------------------------------------------------------------------------------------- model outputs
    def _tokens(self, record: Record) -> None:
        ordinal, index = record["of"]
        ids = list(_token_ids(record["ids"]))
        place, longest = int(record["at"]), self._recording.setup.scheduler.max_model_len
        if not 0 <= place < longest:
            raise ValueError(f"place {place} of an answer, beyond max_model_len {longest}")
        self._recording.outputs.add_tokens((int(ordinal), int(index)), place, ids)

    def _beams(self, record: Record) -> None:
        lines = [[-np.inf if score is None else score for score in line] for line in record["scores"]]
        ids, scores = np.array(record["ids"], dtype=np.int32), np.array(lines, dtype=np.float32)
        if ids.shape != scores.shape or ids.ndim != 2 or len(record["sampled"]) != len(ids):
            raise ValueError("candidates and scores of different shapes")
        candidates = BeamCandidates(ids, scores, tuple(record["sampled"]))
        self._recording.outputs.beams[int(record["of"]), int(record["at"])] = candidates

    def _logprobs(self, record: Record) -> None:
        for (ordinal, index, place), value in zip(record["of"], record["values"], strict=True):
            self._recording.outputs.logprobs[ordinal, index, place] = float("-inf") if value is None else float(value)

    def _grammar(self, record: Record) -> None:
        results, path = self._recording.outputs.grammars[int(record["of"])], str(record["path"])
        if record.get("over"):
            results.over.add(path)
        if "forced" in record and self._recording.setup.tokens == "exact":
            forced = tuple(record["forced"])  # cut at the caller's limit, so keep the longest
            results.forced[path] = max(forced, results.forced.get(path, ()), key=len)
        if "fault" in record:
            results.faults[path] = str(record["fault"])
        if "refused" in record:
            results.refused.add((path, int(record["refused"])))

    def _draft(self, record: Record) -> None:
        ordinal, index = record["of"]
        self._recording.outputs.drafts[int(ordinal), int(index), int(record["at"])] = tuple(record["ids"])

    def _failure(self, record: Record) -> None:
        ordinal, index = record["of"]
        failure = Failure(int(record["at"]), str(record["reason"]))
        self._recording.outputs.failures[int(ordinal), int(index)] = failure


def _setup(record: Record) -> Setup:
    speculation = record["speculation"]
    return Setup(
        quire=record["quire"],
        date=record["date"],
        tokens=record["tokens"],
        vocab_size=int(record["vocab_size"]),
        depth=int(record["depth"]),
        cache=from_json(CacheConfig, record["cache"]),
        scheduler=from_json(SchedulerConfig, record["scheduler"]),
        speculation=None if speculation is None else from_json(SpeculationConfig, speculation),
    )


def _token_ids(ids: list[int]) -> tuple[int, ...]:
    if not all(isinstance(token, int) for token in ids):
        raise ValueError("ids that are no whole numbers")
    return tuple(ids)


def _report(record: Record) -> TransferReport:
    return TransferReport(
        stored=tuple(map(bytes.fromhex, record.get("stored", ()))),
        fetched=tuple(map(bytes.fromhex, record.get("fetched", ()))),
        failed=tuple(FailedFile(bytes.fromhex(key), reason) for key, reason in record.get("failed", ())),
        found=tuple(FoundFile(bytes.fromhex(key), *about) for key, *about in record.get("found", ())),
        num_saved=int(record.get("num_saved", 0)),
        num_loaded=int(record.get("num_loaded", 0)),
        save_seconds=float(record.get("save_seconds", 0.0)),
        load_seconds=float(record.get("load_seconds", 0.0)),
    )


def from_json(cls: type[T], data: Record) -> T:
    """Rebuild a dataclass from the JSON of its `asdict`. Raises ValueError for unknown and missing fields."""
    hints, known = get_type_hints(cls), {item.name for item in fields(cls)}  # type: ignore[arg-type]
    if unknown := set(data) - known:
        raise ValueError(f"{cls.__name__} has no {sorted(unknown)[0]!r}")
    values = {name: _value_from_json(hints[name], value) for name, value in data.items()}
    needed = {item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING}  # type: ignore[arg-type]
    if missing := needed - set(values):
        raise ValueError(f"{cls.__name__} needs {sorted(missing)[0]!r}")
    return cls(**values)


def _value_from_json(hint: Any, value: Any) -> Any:
    if value is not None and get_origin(hint) in (Union, UnionType):
        hint = next((each for each in get_args(hint) if is_dataclass(each)), hint)
    if isinstance(value, dict) and is_dataclass(hint):
        return from_json(hint, value)  # type: ignore[arg-type]
    if hint in (int, str, bool) and not isinstance(value, hint):
        raise ValueError(f"{value!r} is no {hint.__name__}")
    return tuple(value) if isinstance(value, list) else value
