from __future__ import annotations

import pytest

from quire.serving.batch import Batch, Feed
from quire.serving.requests import Prompt, RequestMaker
from quire.types.output import RequestOutput
from quire.types.sampling import SamplingParams
from tests.unit.serving.scripted import EOS_ID, TOKENIZER, Script, ScriptedExecutor, ids, make_client

LONG = SamplingParams(max_tokens=200)


def _run(script: Script, sampling: SamplingParams = LONG, *, depth: int = 1) -> RequestOutput:
    client = make_client(ScriptedExecutor(script, depth=depth))
    batch = Batch(client, TOKENIZER)
    (request,) = RequestMaker(TOKENIZER, ()).make([Prompt(text="say")], [sampling])
    batch.submit(request, "say")
    while batch.is_live:
        batch.step()
    return batch.outputs[0]


def test_an_answer_is_text_and_tokens_with_the_end_of_text_only_among_the_tokens() -> None:
    (completion,) = _run(lambda prompt, index: "grüße ☕").outputs
    assert completion.text == "grüße ☕"
    assert completion.token_ids == [*ids("grüße ☕"), EOS_ID]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


def test_special_tokens_show_when_asked_for() -> None:
    sampling = SamplingParams(max_tokens=50, skip_special_tokens=False, include_stop_str_in_output=True)
    assert _run(lambda prompt, index: "hi", sampling).outputs[0].text == "hi<end>"


def test_without_detokenization_the_text_is_empty() -> None:
    completion = _run(lambda prompt, index: "hi", SamplingParams(max_tokens=50, detokenize=False)).outputs[0]
    assert completion.text == ""
    assert completion.token_ids == [*ids("hi"), EOS_ID]


def test_an_answer_cut_by_length_may_end_inside_a_character() -> None:
    completion = _run(lambda prompt, index: "a☕", SamplingParams(max_tokens=2)).outputs[0]
    assert completion.finish_reason == "length"
    assert completion.text == "a�"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_string_ends_the_text_before_it_and_cuts_later_tokens(depth: int) -> None:
    sampling = SamplingParams(max_tokens=100, stop=["END", "###"])
    completion = _run(lambda prompt, index: "one EN two END three", sampling, depth=depth).outputs[0]
    assert completion.text == "one EN two "
    assert completion.token_ids == ids("one EN two END")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")


def test_a_stop_string_may_be_kept_in_the_text() -> None:
    sampling = SamplingParams(max_tokens=100, stop="END", include_stop_str_in_output=True)
    assert _run(lambda prompt, index: "one END two", sampling).outputs[0].text == "one END"


def test_text_held_back_for_a_stop_string_comes_out_when_the_end_is_another() -> None:
    sampling = SamplingParams(max_tokens=100, stop="END")
    completion = _run(lambda prompt, index: "one EN", sampling).outputs[0]
    assert (completion.text, completion.stop_reason) == ("one EN", None)


def test_a_stop_string_on_the_very_last_token_wins_over_length() -> None:
    completion = _run(lambda prompt, index: "abcdef", SamplingParams(max_tokens=3, stop="c")).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", "c")


def test_no_stop_string_is_seen_before_min_tokens() -> None:
    sampling = SamplingParams(max_tokens=100, min_tokens=4, stop="x")
    completion = _run(lambda prompt, index: "axbxcxd", sampling).outputs[0]
    assert completion.text == "axbxc"
    assert completion.stop_reason == "x"


def test_a_stop_token_is_in_the_tokens_but_not_in_the_text() -> None:
    (bang,) = ids("!")
    for stop in ((), ("never",)):  # decoded at the end, and token by token
        sampling = SamplingParams(max_tokens=100, stop_token_ids=[bang], stop=stop)
        completion = _run(lambda prompt, index: "stop! now", sampling).outputs[0]
        assert (completion.text, completion.stop_reason) == ("stop", bang)
        assert completion.token_ids == ids("stop!")


def test_samples_of_one_request_end_each_in_its_own_way_and_come_in_order() -> None:
    texts = ["short", "one END two", "this one is rather long and is cut"]
    sampling = SamplingParams(n=3, max_tokens=14, stop="END")
    outputs = _run(lambda prompt, index: texts[index], sampling).outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [output.text for output in outputs] == ["short", "one ", "this one is ra"]
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "length"]
    assert [output.stop_reason for output in outputs] == [None, "END", None]


def test_logprobs_are_dicts_with_the_chosen_token_first_and_are_cut_with_the_tokens() -> None:
    sampling = SamplingParams(max_tokens=100, logprobs=2, stop="b")
    completion = _run(lambda prompt, index: "abc", sampling).outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 2
    first = completion.logprobs[0]
    token = ids("a")[0]
    assert next(iter(first)) == token
    assert (first[token].rank, first[token].decoded_token) == (9, "a")
    assert [entry.rank for entry in first.values()] == [9, 1, 2]
    assert completion.cumulative_logprob == pytest.approx(-3.0)


def test_tokens_asked_for_by_id_have_logprobs_without_ranks_unless_they_are_among_the_best() -> None:
    chosen, best, other = ids("a")[0], ids("a")[0] + 1, ids("z")[0]
    sampling = SamplingParams(max_tokens=1, logprobs=1, logprob_token_ids=[other, best])
    completion = _run(lambda prompt, index: "abc", sampling).outputs[0]
    assert completion.logprobs is not None
    assert {token: entry.rank for token, entry in completion.logprobs[0].items()} == {chosen: 9, best: 1, other: None}
    (bare,) = _run(lambda prompt, index: "abc", SamplingParams(max_tokens=1, logprob_token_ids=[other])).outputs
    assert bare.logprobs is not None
    assert list(bare.logprobs[0]) == [chosen, other]


def test_outputs_come_in_the_order_of_submission() -> None:
    client = make_client(ScriptedExecutor(lambda prompt, index: prompt * 3))
    batch = Batch(client, TOKENIZER)
    prompts = ["a" * size for size in (20, 1, 9, 4)]
    requests = RequestMaker(TOKENIZER, ()).make([Prompt(text=prompt) for prompt in prompts], [LONG] * 4)
    for request, prompt in zip(requests, prompts, strict=True):
        batch.submit(request, prompt)
    while batch.is_live:
        batch.step()
    assert [output.prompt for output in batch.outputs] == prompts
    assert [output.outputs[0].text for output in batch.outputs] == [prompt * 3 for prompt in prompts]
    assert batch.num_finished == 4
    assert all(output.metrics["latency_seconds"] >= 0 for output in batch.outputs)


def test_the_prompt_of_an_output_is_a_list_of_its_own() -> None:
    client, maker = make_client(ScriptedExecutor(lambda prompt, index: "fine")), RequestMaker(TOKENIZER, ())
    batch, prompts = Batch(client, TOKENIZER), [Prompt(token_ids=tuple(ids("abc"))), Prompt(text="abc")]
    feed = Feed(batch, [*prompts, *prompts], lambda part: maker.make([*prompts, *prompts][part], [LONG] * 4))
    feed.submit_all()
    while batch.is_live:
        batch.step()
    assert [output.prompt_token_ids for output in batch.outputs] == [ids("abc")] * 4
    batch.outputs[0].prompt_token_ids.clear()
    assert batch.outputs[2].prompt_token_ids == ids("abc")


def test_a_cancelled_batch_leaves_the_engine_free() -> None:
    client = make_client(ScriptedExecutor(lambda prompt, index: "x" * 150, depth=2))
    batch = Batch(client, TOKENIZER)
    for request in RequestMaker(TOKENIZER, ()).make([Prompt(text="p")] * 12, [LONG] * 12):
        batch.submit(request, "p")
    for _ in range(5):
        batch.step()
    batch.cancel()
    assert not batch.is_live
    while client.has_work:
        client.receive()
    assert client.stats().blocks.used == 0


def test_a_request_that_fails_alone_says_why_and_keeps_what_it_had() -> None:
    client = make_client(ScriptedExecutor(lambda prompt, index: "fine", fails=frozenset({"bad"})))
    batch = Batch(client, TOKENIZER)
    for request in RequestMaker(TOKENIZER, ()).make([Prompt(text="good"), Prompt(text="bad")], [LONG, LONG]):
        batch.submit(request, None)
    while batch.is_live:
        batch.step()
    good, bad = (output.outputs[0] for output in batch.outputs)
    assert good.text == "fine"
    assert bad.finish_reason == "error"
    assert "boom" in str(bad.stop_reason)
    assert len(batch.errors) == 1


def test_following_all_samples_gives_the_text_in_pieces() -> None:
    client = make_client(ScriptedExecutor(lambda prompt, index: "ein Kaffee ☕ END bitte"))
    batch = Batch(client, TOKENIZER, follow_all=True)
    (request,) = RequestMaker(TOKENIZER, ()).make([Prompt(text="p")], [SamplingParams(max_tokens=99, stop="END")])
    batch.submit(request, "p")
    pieces = []
    while batch.is_live:
        pieces += batch.step()
    assert "".join(piece.text for piece in pieces) == "ein Kaffee ☕ " == batch.outputs[0].outputs[0].text
    assert "�" not in "".join(piece.text for piece in pieces)
    assert [piece.finish_reason for piece in pieces].count(None) == len(pieces) - 1
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "END")


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_following_without_text_gives_the_tokens_of_every_sample(has_tokenizer: bool) -> None:
    client = make_client(ScriptedExecutor(lambda prompt, index: "ab" * (index + 1)))
    batch = Batch(client, TOKENIZER if has_tokenizer else None, follow_all=True)
    sampling = SamplingParams(n=2, max_tokens=50, detokenize=not has_tokenizer)
    (request,) = RequestMaker(TOKENIZER, ()).make([Prompt(text="p")], [sampling])
    batch.submit(request, None)
    pieces = []
    while batch.is_live:
        pieces += batch.step()
    assert {piece.text for piece in pieces} == {""}
    for index, text in enumerate(("ab", "abab")):
        own = [piece for piece in pieces if piece.index == index]
        assert [token for piece in own for token in piece.token_ids] == [*ids(text), EOS_ID]
        assert [piece.finish_reason for piece in own if piece.finish_reason] == ["stop"]
    assert not batch._followed
