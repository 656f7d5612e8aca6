from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from quire.observability.logging import set_up_logging
from quire.types.errors import ConfigError

logger = logging.getLogger("quire.test")


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_hold_the_event_and_its_fields() -> None:
    stream = io.StringIO()
    set_up_logging("info", "json", "edge-1", stream)
    logger.info("request %s", "ended", extra={"request_id": "r1", "tokens": 5})
    logger.debug("not shown")
    event = json.loads(stream.getvalue())
    assert event.pop("time").endswith("+00:00")
    assert event == {
        "level": "info",
        "process": "edge-1",
        "logger": "quire.test",
        "message": "request ended",
        "request_id": "r1",
        "tokens": 5,
    }


def test_text_is_one_line_whatever_the_message_holds() -> None:
    stream = io.StringIO()
    set_up_logging("warning", "text", "engine", stream)
    logger.warning("two\nlines", extra={"request_id": "r1"})
    logger.info("not shown")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("WARNING engine: two\\nlines request_id=r1\n")


@pytest.mark.parametrize("kind", ["text", "json"])
def test_an_exception_keeps_its_traceback(kind: str) -> None:
    stream = io.StringIO()
    set_up_logging("info", kind, "engine", stream)  # type: ignore[arg-type]
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logger.exception("failed")
    assert "RuntimeError: boom" in stream.getvalue()


def test_a_long_text_is_cut() -> None:
    stream = io.StringIO()
    set_up_logging("info", "json", "engine", stream)
    logger.info("x" * 10_000)
    assert len(json.loads(stream.getvalue())["message"]) == 2_000


def test_setting_up_twice_writes_once() -> None:
    stream = io.StringIO()
    set_up_logging("info", "text", "a", io.StringIO())
    set_up_logging("info", "text", "b", stream)
    logger.info("once")
    assert stream.getvalue().count("once") == 1


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="log_level"):
        set_up_logging("loud", "text", "a")
    with pytest.raises(ConfigError, match="log_format"):
        set_up_logging("info", "xml", "a")  # type: ignore[arg-type]


HOSTILE = "a\rb\x1b[2Jc\x00\x7f\x9b\u2028\u202edef\tg\nFAKE"


def test_control_characters_are_escaped_in_messages_fields_and_tracebacks() -> None:
    stream = io.StringIO()
    set_up_logging("info", "text", "edge", stream)
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError:
        logger.exception("%s", HOSTILE, extra={"path": HOSTILE})
    text = stream.getvalue()
    assert [character for character in text if not character.isprintable() and character != "\n"] == []
    escaped = r"a\x0db\x1b[2Jc\x00\x7f\x9b\u2028\u202edef\x09g"
    assert rf"ERROR   edge: {escaped}\nFAKE path={escaped}\nFAKE" in text
    assert all(line.startswith("    ") for line in text.splitlines()[1:])


def test_control_characters_are_escaped_in_json_and_read_back_the_same() -> None:
    stream = io.StringIO()
    set_up_logging("info", "json", "edge", stream)
    logger.info("%s", HOSTILE)
    line = stream.getvalue().removesuffix("\n")
    assert line.isprintable()
    assert json.loads(line)["message"] == HOSTILE
