from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.serving.bench.plot import Panel, draw
from quire.serving.bench.summary import Objective, parse_objective, percentile, summarize
from quire.serving.bench.timeline import Recording, Timeline, read_recording
from quire.types.errors import ConfigError


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(value: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": value, "finish_reason": finish}])


DONE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 3}) + b"data: [DONE]\n\n"


def recorded(*chunks: tuple[float, bytes]) -> Timeline:
    return read_recording(Recording(planned_at=0.9, sent_at=1.0, ended_at=2.0, chunks=list(chunks)))


def test_a_stream_is_timed_by_when_its_bytes_came() -> None:
    seen = recorded((1.1, text("a")), (1.3, text("b")), (1.6, text("c", "length")), (1.7, DONE))
    assert seen.error is None
    assert (seen.num_prompt_tokens, seen.num_output_tokens) == (5, 3)
    assert seen.ttft == pytest.approx(0.1)
    assert seen.tpot == pytest.approx(0.25)
    assert seen.gaps == pytest.approx([0.2, 0.3])
    assert seen.latency == pytest.approx(1.0)


def test_events_cut_anywhere_are_put_together_again() -> None:
    whole = text("a") + text("b") + DONE
    for cut in range(1, len(whole)):
        seen = recorded((1.1, whole[:cut]), (1.2, whole[cut:]))
        assert seen.error is None
        assert seen.num_output_tokens == 3
        assert 1 <= len(seen.events) <= 2


def test_an_event_without_text_is_a_token_but_a_role_or_a_reason_alone_is_none() -> None:
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    half = event(choices=[{"delta": {"content": ""}, "finish_reason": None}])
    word = event(choices=[{"delta": {"content": "a"}}])
    last = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    seen = recorded((1.1, role), (1.2, half), (1.3, word), (1.4, last), (1.5, DONE))
    assert seen.events == (1.2, 1.3)
    assert recorded((1.1, text("")), (1.2, text("", "stop")), (1.3, DONE)).events == (1.1,)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([], "the answer held no token"),
        ([(1.1, text("a"))], "the answer was cut short"),
        ([(1.1, text("a")), (1.2, event(error={"message": "lost"}))], "lost"),
        ([(1.1, b"data: {nonsense\n\n")], "an event is no JSON"),
    ],
)
def test_an_answer_that_failed_is_an_error(chunks: list[tuple[float, bytes]], error: str) -> None:
    assert recorded(*chunks).error == error


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 95, 99, 100]))
def test_percentiles_are_numpys(values: list[float], share: int) -> None:
    assert percentile(values, share) == pytest.approx(np.percentile(values, share))


def line(sent: float, first: float, last: float, tokens: int, error: str | None = None) -> Timeline:
    return Timeline(sent, sent, last, (first, last), 10, tokens, error)


def test_goodput_counts_requests_that_keep_every_objective_and_failures_are_no_latencies() -> None:
    runs = [
        line(0, 0.1, 1.1, 11),
        line(0, 0.5, 1.5, 11),
        line(0, 0.1, 4.1, 5),
        line(0, 0.0, 2.0, 0, error="status 500"),
    ]
    found = summarize(runs, [Objective("ttft", 200), Objective("tpot", 150)], lags=[0.001])
    assert (found["requests"], found["completed"], found["failed"]) == (4, 3, 1)
    assert found["errors"] == [{"message": "status 500", "count": 1}]
    assert found["duration_s"] == pytest.approx(4.1)
    assert found["goodput_requests_per_s"] == pytest.approx(1 / 4.1)
    assert found["goodput_share"] == 0.25
    assert found["ttft_ms"]["p50"] == pytest.approx(100)
    assert found["ttft_ms"]["max"] == pytest.approx(500)
    assert found["output_tokens_per_s"] == pytest.approx(27 / 4.1)
    assert found["client"]["loop_lag_ms"]["max"] == pytest.approx(1.0)
    assert json.dumps(found)


def test_a_run_in_which_all_failed_is_still_a_report() -> None:
    found = summarize([line(0, 0.0, 1.0, 0, error="refused")], [], lags=[])
    assert found["completed"] == 0
    assert found["ttft_ms"] is None


def test_objectives_are_names_and_milliseconds() -> None:
    assert parse_objective("ttft:200") == Objective("ttft", 200)
    assert parse_objective("e2e=1500.5") == Objective("e2e", 1500.5)
    for wrong in ("ttft", "speed:3", "ttft:-1", "ttft:nan", "ttft:fast"):
        with pytest.raises(ConfigError, match="goodput"):
            parse_objective(wrong)


def test_a_plot_is_valid_xml_with_a_line_per_run_whatever_the_labels_hold() -> None:
    panels = [
        Panel("a < b & c", (("x<y", (1.0, 5.0, 80.0)), ("z", tuple(map(float, range(2_000)))))),
        Panel("none", ()),
    ]
    root = ET.fromstring(draw(panels, 'the "title" & more'))
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2
    assert all(len(found.attrib["points"].split()) <= 241 for found in lines)
    assert "no values" in draw(panels, "t")
