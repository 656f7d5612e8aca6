"""Tokens in JSON."""

from __future__ import annotations

import json

import numpy as np

from quire.serving.http.endpoints.openai_logprobs import (
    LOWEST,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    render_chat,
    render_completion,
)
from quire.types.step import LogprobTable, TokenLogprobs
from tests.unit.serving.scripted import TOKENIZER, ids


def entry(*pairs: tuple[int, float]) -> TokenLogprobs:
    tokens, values = zip(*pairs, strict=True)
    return TokenLogprobs(np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32), rank=3)


FIRST, SECOND = ids("é")  # half a character each


def test_half_a_character_keeps_its_bytes() -> None:
    (column,) = render_chat(TokenNames(TOKENIZER))(entry((FIRST, -0.5), (SECOND, -1.0)), 0)
    found = json.loads(column)
    assert (found["token"], found["bytes"]) == ("\ufffd", [0xC3])
    assert found["top_logprobs"][0]["bytes"] == [0xA9]


def test_halves_of_characters_stay_apart_as_keys() -> None:
    columns = render_completion(TokenNames(TOKENIZER))(entry((FIRST, -0.5), (FIRST, -0.5), (SECOND, -1.0)), 7)
    assert json.loads(columns[0]) == "bytes:\\xc3"
    assert json.loads(columns[2]) == {"bytes:\\xc3": -0.5, "bytes:\\xa9": -1.0}
    assert columns[3] == b"7"


def test_impossible_tokens_have_a_number_json_can_hold() -> None:
    (column,) = render_chat(TokenNames(TOKENIZER))(entry((65, float("-inf")), (66, float("-inf"))), 0)
    found = json.loads(column)
    assert found["logprob"] == found["top_logprobs"][0]["logprob"] == LOWEST


def test_tokens_may_be_written_as_ids() -> None:
    columns = render_completion(TokenNames(TOKENIZER, as_ids=True))(entry((65, -1.0)), 0)
    assert json.loads(columns[0]) == "token_id:65"


def test_nothing_at_all_is_still_json() -> None:
    assert json.loads(chat_logprobs([])) == {"content": [], "refusal": None}
    assert json.loads(completion_logprobs([]))["tokens"] == []


def test_prompt_logprobs_rank_the_chosen_token_first() -> None:
    one = entry((65, -1.0), (66, -0.5))
    table = LogprobTable(1, one.token_ids, one.logprobs, np.array([one.rank], dtype=np.int32))
    found = json.loads(prompt_logprobs(table, TokenNames(TOKENIZER), -1))
    assert found[0] is None
    assert [(token, found[1][token]["rank"]) for token in found[1]] == [("65", 3), ("66", 1)]


def test_long_tables_are_read_line_by_line() -> None:
    num_tokens = 700
    numbers = np.arange(2 * num_tokens, dtype=np.int32)
    table = LogprobTable(2, numbers, -numbers.astype(np.float32), np.arange(num_tokens, dtype=np.int32))
    lines = list(table.lines())
    assert lines[:3] == [None] * 3  # two before the table, and one that was not computed
    assert lines[3:] == [([2 * k, 2 * k + 1], [-2.0 * k, -2.0 * k - 1], k) for k in range(1, num_tokens)]
