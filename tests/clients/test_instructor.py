"""Instructor: answers as models, by tools, by a JSON schema and by JSON mode."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.conftest import Served

instructor = pytest.importorskip("instructor")
pytestmark = pytest.mark.model


class City(BaseModel):
    """A city and where it lies."""

    model_config = ConfigDict(extra="forbid")  # else the model may add members without end
    name: str = Field(max_length=20)
    continent: Literal["Africa", "Asia", "Europe"]


MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def client(served: Served, mode: str) -> Any:
    import openai

    return instructor.from_openai(
        openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_an_answer_arrives_as_a_model(served: Served, mode: str) -> None:
    found = client(served, mode).chat.completions.create(
        model=served.model, messages=MESSAGES, response_model=City, temperature=0, max_tokens=64, max_retries=0
    )
    assert isinstance(found, City)


def test_a_model_grows_while_it_is_streamed(served: Served) -> None:
    pieces = list(
        client(served, "TOOLS").chat.completions.create_partial(
            model=served.model, messages=MESSAGES, response_model=City, temperature=0, max_tokens=64
        )
    )
    assert pieces[-1].name
    assert pieces[-1].continent in ("Africa", "Asia", "Europe")


def test_a_failed_validation_is_sent_back_and_asked_again(served: Served) -> None:
    """Instructor returns the call and the error of its validation as messages. The server must take both."""
    from pydantic import field_validator

    seen: list[str] = []

    class Judged(BaseModel):
        """A city."""

        model_config = ConfigDict(extra="forbid")
        name: str = Field(max_length=20)

        @field_validator("name")
        @classmethod
        def second_is_right(cls, name: str) -> str:
            seen.append(name)
            if len(seen) < 2:
                raise ValueError("name the city in capital letters")
            return name

    found = client(served, "TOOLS").chat.completions.create(
        model=served.model, messages=MESSAGES, response_model=Judged, temperature=0, max_tokens=64, max_retries=3
    )
    assert found.name == seen[-1]
    assert len(seen) >= 2
