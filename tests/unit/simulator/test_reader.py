"""Damaged files give clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.simulator.reader import read_recording
from quire.simulator.recording import RecordingError
from recorded_load import RecordedLoad


@pytest.fixture
def path(tmp_path: Path) -> Path:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("one", [5, 6, 7], max_tokens=4)
    load.run()
    return load.close()


def test_a_whole_recording_is_read_back(path: Path) -> None:
    recording = read_recording(path)
    assert recording.end_reason == "closed"
    assert (recording.setup.tokens, recording.setup.depth, recording.setup.cache.block_size) == ("exact", 1, 4)
    assert [event.request.request_id for event in recording.submits()] == ["one"]
    assert len(recording.outputs.tokens[0, 0]) == 4
    assert [size[:2] for size in recording.step_sizes()] == [(3, 0), (0, 1), (0, 1), (0, 1)]


@pytest.mark.parametrize("text", ["", "hello\n", "{}\n", '{"is": "submit"}\n', "\x00\xff\n"])
def test_what_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(RecordingError, match="is no recording; make one with --record FILE"):
        read_recording(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"nothing\.jsonl cannot be read: No such file"):
        read_recording(tmp_path / "nothing.jsonl")


def test_another_format_is_refused_with_its_maker(path: Path) -> None:
    path.write_text(path.read_text().replace('"format":2', '"format":7'))
    with pytest.raises(RecordingError, match=r"format 7, made by quire .*; this version reads format 2"):
        read_recording(path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{broken", "line 3: damaged"),
        ("[1, 2]", "line 3: is no object"),
        ('{"is": "step"}', "line 3: not a record of format 2: has no 'plans'"),
        ('{"is": "other"}', "'other' is unknown"),
        ('{"is": "tokens", "of": [0, 0], "at": 0, "ids": ["a"]}', "ids that are no whole numbers"),
        ('{"is": "beams", "of": 0, "at": 0, "sampled": [], "ids": [[1]], "scores": [[1.0]]}', "of different shapes"),
        ('{"is": "abort", "of": 0}', "has no 'index'"),
        ('{"is": "abort", "of": 7, "index": null, "stop": false, "tokens": 0, "clock": []}', "has no 7"),
        ('{"is": "tokens", "of": [0, 0], "at": 99999999999999, "ids": [1]}', "beyond max_model_len 160"),
        ('{"is": "beams", "of": 0, "at": 0, "sampled": [1], "ids": [[5000000000]], "scores": [[1.0]]}', "line 3"),
        ('{"is": "reset_cache", "clock": [-1.0]}', "a clock that went back"),
        ('{"is": "reset_cache", "clock": [NaN]}', "a clock that went back"),
        ('{"is": "end", "of": 0, "ledger": [[1, 2, 3, 4, 5]]}', "line 3"),
    ],
)
def test_a_damaged_record_is_named_by_its_line(line: str, told: str, path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordingError) as caught:
        read_recording(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_answers_that_were_cut_out_of_a_file_are_no_end_of_the_reader(reason: str, tmp_path: Path) -> None:
    load = RecordedLoad(tmp_path / "run.jsonl")
    load.submit("one", [5, 6, 7], max_tokens=4)
    load.run()
    path = load.close()
    lines = [line for line in path.read_text().splitlines() if '"is":"tokens"' not in line]
    text = "\n".join(lines).replace('"texts":[]', '"texts":["stop"]')
    path.write_text(text.replace('"reasons":["length"]', f'"reasons":["{reason}"]') + "\n")
    assert not read_recording(path).outputs.tokens


def test_a_configuration_that_this_version_does_not_know_is_named(path: Path) -> None:
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header["scheduler"]["unheard_of"] = 1
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    with pytest.raises(RecordingError, match="line 1: .*SchedulerConfig has no 'unheard_of'"):
        read_recording(path)


def test_a_setting_of_another_kind_is_told(path: Path) -> None:
    path.write_text(path.read_text().replace('"num_blocks":48', '"num_blocks":"many"'))
    with pytest.raises(RecordingError, match="line 1: .*'many' is no int"):
        read_recording(path)


def test_nothing_may_follow_the_end(path: Path) -> None:
    path.write_text(path.read_text() + '{"is": "reset_cache", "clock": []}\n')
    with pytest.raises(RecordingError, match="it comes after the end"):
        read_recording(path)
