"""Streamed is the same as whole for every parser of calls and reasoning, over random answers and random cuts.

QUIRE_TEST_CUTS sets how many cuts each parser is tried with.
"""

from __future__ import annotations

import json
import os
import random

import pytest

from split_text import read
from written_answers import REASONINGS, WRITERS, random_answer, random_calls, random_cuts, reading_of

CUTS = int(os.environ.get("QUIRE_TEST_CUTS", "400"))
NAMES = {name: name if len(name) < 20 else f"derived {place}" for place, name in enumerate(WRITERS)}


def reasonings(form: str) -> list[str | None]:
    return ["harmony", None] if form == "harmony" else [None, *(name for name in REASONINGS if name != "harmony")]


@pytest.mark.parametrize("form", WRITERS, ids=NAMES.__getitem__)
def test_streamed_is_the_same_as_whole_for_every_parser_of_calls(form: str) -> None:
    rng = random.Random(f"calls {form}")
    for number in range(CUTS):
        reasoning = rng.choice(reasonings(form))
        reading, answer = reading_of(form, reasoning, inside=rng.random() < 0.2), random_answer(rng, form, reasoning)
        cuts = random_cuts(rng, len(answer))
        assert read(reading.reader, answer, cuts) == read(reading.reader, answer), (number, reasoning, answer, cuts)


@pytest.mark.parametrize("reasoning", REASONINGS)
def test_streamed_is_the_same_as_whole_for_every_parser_of_reasoning(reasoning: str) -> None:
    rng = random.Random(f"reasoning {reasoning}")
    forms = ["harmony"] if reasoning == "harmony" else [form for form in WRITERS if form != "harmony"]
    for number in range(CUTS):
        form = rng.choice(forms)
        reading, answer = reading_of(form, reasoning, inside=rng.random() < 0.4), random_answer(rng, form, reasoning)
        cuts = random_cuts(rng, len(answer))
        assert read(reading.reader, answer, cuts) == read(reading.reader, answer), (number, form, answer, cuts)


@pytest.mark.parametrize("form", WRITERS, ids=NAMES.__getitem__)
def test_calls_are_read_as_they_were_written_and_no_part_of_them_is_text(form: str) -> None:
    rng = random.Random(f"written {form}")
    for _ in range(max(CUTS // 20, 5)):
        calls = random_calls(rng)
        calls = calls[:1] if form == "harmony" else calls
        written = WRITERS[form](calls)
        parts = read(reading_of(form, None).reader, written, random_cuts(rng, len(written)))
        names = [text for kind, text in parts if kind == "call"]
        arguments = [json.loads(text) for kind, text in parts if kind == "arguments"]
        assert list(zip(names, arguments, strict=True)) == calls, written
        assert not [part for part in parts if part[0] == "said"], written
        for end in range(len(written)):
            said = [text for kind, text in read(reading_of(form, None).reader, written[:end]) if kind == "said"]
            assert len("".join(said)) <= (end == 1), written[:end]  # the first character of a mark may be a word
