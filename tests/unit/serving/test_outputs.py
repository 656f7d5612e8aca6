from __future__ import annotations

from quire.serving.outputs import own_fault
from quire.types.output import Finished


def test_a_request_that_asked_for_what_cannot_be_is_told_the_field_once() -> None:
    fault = own_fault(Finished("r", (), error="structured_outputs: too costly", refused="structured_outputs"))
    assert str(fault) == "structured_outputs: too costly"


def test_a_reason_without_a_field_gets_it() -> None:
    assert str(own_fault(Finished("r", (), error="too costly", refused="prompt"))) == "prompt: too costly"


def test_a_failure_of_the_engine_is_nobodys_fault() -> None:
    assert own_fault(Finished("r", (), error="structured_outputs: looks like a field")) is None
