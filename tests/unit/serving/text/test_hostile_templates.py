"""Templates that mean harm end in an error, wherever they are rendered and however they try."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from quire.serving.text.chat_template import ChatTemplate
from quire.serving.text.template_budget import TemplateLimits
from quire.types.errors import QuireError
from tests.unit.serving.text.hostile_templates import ENDLESS, ESCAPES, GREEDY

MESSAGES = [{"role": "user", "content": "hi"}]
QUICK = TemplateLimits(seconds=0.1)  # the tests need not wait for the whole time a template may take


def render(source: str) -> str:
    """What `source` renders to, or the error it ended in, from a thread that is not the main one."""
    result: list[str] = []

    def work() -> None:
        try:
            result.append("rendered: " + ChatTemplate(source, limits=QUICK).render(MESSAGES))
        except QuireError as error:
            result.append(f"refused: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert result, "it is still running, or died of something that is no refusal"
    return result[0]


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_run_for_ever_is_stopped(name: str) -> None:
    assert render(ENDLESS[name]).startswith("refused: ")


@pytest.mark.parametrize("name", GREEDY)
def test_a_template_that_would_fill_the_memory_is_stopped(name: str) -> None:
    tracemalloc.start()
    try:
        assert render(GREEDY[name]).startswith("refused: ")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_that_reaches_for_python_gets_nothing(name: str) -> None:
    answer = render(ESCAPES[name])
    assert answer.startswith("refused: ") or answer in ("rendered: ", "rendered: [Undefined]")
