"""What an engine's recording holds, and what it costs nobody."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_executor import VOCAB
from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.recording import RecordingConfig, check_recording, read_recording
from quire.engine.core import EngineCore
from quire.engine.recording import writer as writer_module
from quire.engine.recording.tokens import ExactTokens, HashedTokens
from quire.engine.recording.writer import RecordingWriter
from quire.simulator.reader import read_recording as read_file
from quire.simulator.replay import replay
from quire.types.errors import ConfigError, InvalidRequest
from quire.types.request import Abort, Branch
from quire.types.sampling import TokenRules
from recorded_load import RecordedLoad, TickingClock, play_random_load


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["is"] == kind]


def test_a_recording_holds_requests_steps_tokens_and_ends(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("one", [5, 6, 7], max_tokens=6, cache_salt="s", tenant="t")
    load.run()
    records = read(load.close())
    assert records[0]["is"] == "quire recording"
    assert records[0]["scheduler"]["max_num_batched_tokens"] == 32
    (submit,) = of_kind(records, "submit")
    assert (submit["id"], submit["prompt"], submit["salt"], submit["tenant"]) == ("one", [5, 6, 7], "s", "t")
    assert submit["sampling"] == {"max_tokens": 6}
    steps = of_kind(records, "step")
    assert steps[0]["plans"][0]["chunks"] == [[0, 0, 0, 3, 1]]
    assert [step["plans"][0]["decode"] for step in steps] == [0, 1, 1, 1, 1, 1]
    assert len([second for step in steps for second in step["took"]]) == 6
    (tokens,) = of_kind(records, "tokens")
    assert tokens["ids"] == list(load.finished["one"].samples[0].token_ids)
    (end,) = of_kind(records, "end")
    assert (end["reasons"], end["lengths"], end["ledger"][0][0]) == (["length"], [6], "queued")
    assert records[-1] == {"is": "over", "reason": "closed"}


def test_the_file_is_its_owners_alone_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first, second = RecordedLoad(path), RecordedLoad(path)
    assert [load.close() for load in (first, second)] == [path, tmp_path / "run.jsonl.2"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read(path)) == 2


def test_a_file_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record: .*missing.* cannot be made"):
        RecordedLoad(tmp_path / "missing" / "run.jsonl")


def test_a_full_recording_says_so_and_the_engine_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_FLUSH_BYTES", 1_000)
    load = RecordedLoad(tmp_path / "run.jsonl", limit=2**20)
    load.writer._limit = 4_000
    play_random_load(load)
    assert len(load.finished) == 40
    records = read(load.close())
    assert not load.writer._events
    assert records[-1] == {"is": "over", "reason": "the file has the 4000 bytes it may have"}
    assert not any(record["is"] == "over" for record in records[:-1])


def test_a_writer_that_falls_behind_stops_and_delays_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_PENDING", 8)
    resume, encode = threading.Event(), RecordingWriter._encode

    def wait(self: RecordingWriter, event: Any) -> None:
        resume.wait(120)
        encode(self, event)

    monkeypatch.setattr(RecordingWriter, "_encode", wait)
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("one", [5, 6, 7], max_tokens=20)
    load.run()
    resume.set()
    assert len(load.finished["one"].samples[0].token_ids) == 20
    assert read(load.close())[-1]["reason"] == "more than 8 events were waiting to be written"


def test_a_disk_that_fails_ends_the_recording_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")

    def fail(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module.os, "write", fail)
    load.submit("one", [5, 6, 7], max_tokens=4)
    load.run()
    load.close()
    assert len(load.finished["one"].samples[0].token_ids) == 4
    assert not load.writer._events


def test_a_recording_ends_when_its_program_does(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("one", [5, 6, 7])
    load.step()
    load.writer.close()  # as at exit
    load.step()
    assert read(load.close())[-1] == {"is": "over", "reason": "closed"}


def test_refused_requests_and_unknown_aborts_leave_no_trace(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    with pytest.raises(InvalidRequest):
        load.submit("long", [5] * 500)
    load.core.abort(Abort("nobody"))
    load.submit("one", [5, 6], max_tokens=2)
    load.run()
    records = read(load.close())
    assert [record["id"] for record in of_kind(records, "submit")] == ["one"]
    assert not of_kind(records, "abort")


def test_a_request_that_is_refused_late_leaves_no_reading_of_the_clock(tmp_path: Path) -> None:
    """It is refused after its arrival was noted. What follows is decided again by the same readings."""
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("one", [5, 6, 7], max_tokens=6)
    load.step()
    with pytest.raises(InvalidRequest):
        load.submit("branch", [5, 6, 8], source=Branch("one", 0, 3))
    load.run()
    result = replay(read_file(load.close()))
    assert result.difference is None, str(result.difference)


def test_an_engine_that_dies_is_recorded_to_its_end(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.executor.crash_at = 3
    load.submit("one", [5, 6], max_tokens=9)
    load.run()
    records = read(load.close())
    assert "device lost" in of_kind(records, "dead")[0]["reason"]
    assert of_kind(records, "end")[0]["error"] is not None


def test_hashed_tokens_are_alike_exactly_as_far_as_what_they_stand_for() -> None:
    encoding = HashedTokens(vocab_size=100)
    one = encoding.prompt(0, "", [5, 6, 7, 7, 7], ())
    other = encoding.prompt(1, "", [5, 6, 8, 7, 7], ())
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
    assert len(set(one)) == 5  # the same token at another place has another hash
    assert min(one) >= 100
    assert encoding.prompt(2, "salt", [5, 6], ()) != one[:2]
    assert HashedTokens(100).prompt(0, "", [5, 6], ()) != one[:2]  # the key is this recording's own


def test_hashed_answers_go_on_from_their_prompts_and_keep_what_ends_them() -> None:
    encoding = HashedTokens(vocab_size=100)
    encoding.prompt(0, "", [5, 6], (3,))
    said = encoding.outputs(0, 0, 0, [7, 8, 3])
    assert said[2] == 3
    assert encoding.prompt(1, "", [5, 6, 7, 8, 9], ())[2:4] == said[:2]
    assert encoding.outputs(0, 0, 1, [8]) == said[1:2]  # sampled once more after a preemption
    assert encoding.path(0, [7, 8]) == said[:2]
    encoding.forget(0)
    assert encoding.outputs(0, 0, 3, [1]) == []


def test_a_hashed_recording_holds_no_token_and_no_words(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", tokens="hashed", cache=CacheConfig(4, 200))
    rules = TokenRules(end_ids=(3,), bad_words=((11, 12),))
    load.submit("one", [5, 6, 7], rules=rules, cache_salt="secret", stop=("word",), bad_words=("no",), tenant="key")
    load.run()
    text = load.close().read_text()
    (submit,) = of_kind([json.loads(line) for line in text.splitlines()], "submit")
    assert min(submit["prompt"]) >= 90
    for word in ("secret", "word", "no", "key"):
        assert f'"{word}"' not in text
    assert submit["rules"] == {"end_ids": [3], "eos_ids": []}


def test_recording_changes_no_decision(tmp_path: Path) -> None:
    decided = []
    for name in ("recorded", "plain"):
        load = RecordedLoad(tmp_path / name, seed=3)
        if name == "plain":
            load.core = EngineCore(load.executor, load.cache, load.scheduler, VOCAB, clock=TickingClock(load.seed))  # type: ignore[assignment]
        play_random_load(load, 20)
        load.close()
        load.writer.close()
        ledgers = {
            request: [(entry.kind, entry.amount) for entry in message.ledger]
            for request, message in load.finished.items()
        }
        answers = {request: message.samples for request, message in load.finished.items()}
        decided.append((answers, ledgers, load.core.stats().steps))
    assert decided[0] == decided[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_step_took_is_no_time_in_which_nothing_was_launched(depth: int, tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", depth=depth)
    load.submit("one", [5, 6, 7], max_tokens=6)
    load.step()
    load.core.abort(Abort("one"))
    load.submit("two", [5, 6, 7], max_tokens=6)
    load.clock.now += 30.0  # the loop that calls the engine is held up
    load.run()
    took = [second for step in of_kind(read(load.close()), "step") for second in step["took"]]
    assert len(took) >= 7
    held_up = 1 if depth == 2 else 0  # a step was in flight meanwhile
    assert sum(second > 1.0 for second in took) == held_up
    assert min(took) > 0


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ((None, "exact", None), "record_tokens"),
        ((None, None, "1GiB"), "record_limit"),
        (("run", "other", None), "record_tokens"),
        (("run", None, "10"), "record_limit"),
        (("", None, None), "record"),
    ],
)
def test_bad_settings_are_refused_by_name(given: tuple[Any, Any, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        read_recording(*given)


def test_hashed_tokens_go_with_neither_speculation_nor_files() -> None:
    hashed = RecordingConfig("run", "hashed")
    for speculates, has_files in ((True, False), (False, True)):
        with pytest.raises(ConfigError, match="record_tokens"):
            check_recording(hashed, speculates=speculates, has_files=has_files)
        check_recording(RecordingConfig("run"), speculates=speculates, has_files=has_files)
    assert read_recording("run", None, None) == RecordingConfig("run")
    assert read_recording(None, None, None) is None


def test_exact_tokens_are_themselves() -> None:
    encoding = ExactTokens()
    assert encoding.prompt(0, "", (1, 2), ()) == encoding.outputs(0, 0, 0, [1, 2]) == encoding.path(0, [1, 2]) == [1, 2]


def test_tokens_of_steps_in_flight_when_a_sample_ends_do_no_harm(tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl", depth=2, scheduler=SchedulerConfig(4, 32, 160))
    load.submit("one", [5, 6, 7], max_tokens=30, rules=TokenRules(end_ids=tuple(range(0, 90, 5))))
    load.submit("two", [8, 9], max_tokens=30)
    load.run()
    records = read(load.close())
    said = {int(record["of"][0]): record["ids"] for record in of_kind(records, "tokens")}
    answer = load.finished["one"].samples[0].token_ids
    assert tuple(said[0][: len(answer)]) == answer
    assert np.isin(answer[-1], np.arange(0, 90, 5))
    assert load.writer.path.stat().st_size < 20_000
