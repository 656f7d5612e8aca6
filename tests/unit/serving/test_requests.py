from __future__ import annotations

import pytest

from quire.serving.prompts import Prompt
from quire.serving.requests import RequestMaker
from quire.types.errors import InvalidRequest
from quire.types.request import pack_tokens
from quire.types.sampling import SamplingParams
from tests.unit.serving.scripted import EOS_ID, TOKENIZER, ids

GREEDY = SamplingParams(temperature=0)


def test_text_is_tokenized_and_ids_are_left_alone() -> None:
    maker = RequestMaker(TOKENIZER, ())
    first, second = maker.make([Prompt(text="ab"), Prompt(token_ids=(7,))], [GREEDY, GREEDY])
    assert first.prompt_token_ids == pack_tokens(ids("ab"))
    assert second.prompt_token_ids == pack_tokens([7])
    assert first.request_id != second.request_id


def test_a_sequence_ends_at_the_eos_of_tokenizer_and_model_and_at_stop_tokens() -> None:
    maker = RequestMaker(TOKENIZER, (3, EOS_ID))
    (request,) = maker.make([Prompt(text="a")], [SamplingParams(stop_token_ids=[9, 3])])
    assert request.rules.end_ids == (EOS_ID, 3, 9)
    assert request.rules.eos_ids == (EOS_ID, 3)


def test_ignoring_eos_leaves_only_the_stop_tokens() -> None:
    maker = RequestMaker(TOKENIZER, (3,))
    (request,) = maker.make([Prompt(text="a")], [SamplingParams(ignore_eos=True, stop_token_ids=[9])])
    assert (request.rules.end_ids, request.rules.eos_ids) == ((9,), ())


def test_bad_words_become_token_sequences() -> None:
    (request,) = RequestMaker(TOKENIZER, ()).make([Prompt(text="a")], [SamplingParams(bad_words=["no"])])
    assert tuple(ids("no")) in request.rules.bad_words


def test_without_a_tokenizer_only_ids_are_taken_and_nothing_may_need_text() -> None:
    maker = RequestMaker(None, (3,))
    (request,) = maker.make([Prompt(token_ids=(1, 2))], [GREEDY])
    assert request.rules.end_ids == (3,)
    with pytest.raises(InvalidRequest, match=r"^prompts.*token ids"):
        maker.make([Prompt(text="a")], [GREEDY])
    with pytest.raises(InvalidRequest, match=r"^stop.*tokenizer"):
        maker.make([Prompt(token_ids=(1,))], [SamplingParams(stop="x")])
    with pytest.raises(InvalidRequest, match=r"^bad_words.*tokenizer"):
        maker.make([Prompt(token_ids=(1,))], [SamplingParams(bad_words=["x"])])


def test_priorities_are_one_per_prompt() -> None:
    maker = RequestMaker(TOKENIZER, ())
    (request,) = maker.make([Prompt(text="a")], [GREEDY], priorities=[4])
    assert request.priority == 4
    with pytest.raises(InvalidRequest, match="^priority"):
        maker.make([Prompt(text="a")], [GREEDY], priorities=[1, 2])
