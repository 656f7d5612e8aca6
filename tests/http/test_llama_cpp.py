"""llama.cpp's endpoints, infill, and small pages that other tools ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from http_server import TestServer
from quire.serving.text.infill import FAMILIES, InfillFormat, Marks, infill_format
from quire.serving.text.special_tokens import SpecialTokens
from quire.serving.text.tokenizer import Tokenizer
from tests.http.conftest import Serve
from tests.http.test_default_sampling import sampled_with
from tests.unit.serving.scripted import EOS_ID, TEMPLATE, ids

CHAT = [{"role": "user", "content": "hi"}]


def post(server: TestServer, path: str, **body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_completion_answers_in_llama_cpps_shape(server: TestServer) -> None:
    body = post(server, "/completion", prompt="abc", n_predict=64, return_tokens=True)
    assert body["content"] == " answer 0 to <abc>"
    assert body["tokens"] == [*ids(" answer 0 to <abc>"), EOS_ID]
    assert (body["stop"], body["stop_type"]) == (True, "eos")
    assert (body["tokens_evaluated"], body["tokens_predicted"]) == (3, len(body["tokens"]))
    cut = post(server, "/completion", prompt="abc", n_predict=4, stop=["zz"])
    assert (cut["stop_type"], cut["tokens_predicted"], cut["tokens"]) == ("limit", 4, [])
    stopped = post(server, "/completion", prompt="abc", stop=["to"])
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == (" answer 0 ", "word", "to")


def test_texts_and_token_ids_may_stand_in_one_list(server: TestServer) -> None:
    told = post(server, "/completion", prompt=[ids("abc"), "abc"], n_predict=64)
    assert [one["content"] for one in told] == [" answer 0 to <abc>"] * 2
    choices = post(server, "/v1/completions", prompt=["abc", ids("abc")], max_tokens=64)["choices"]
    assert [choice["text"] for choice in choices] == [" answer 0 to <abc>"] * 2


def test_completion_streams_in_llama_cpps_shape(server: TestServer) -> None:
    with server.client() as client:
        answer = client.post("/completion", json={"prompt": "abc", "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == " answer 0 to <abc>"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["stop_type"] == "eos"


def test_completion_follows_a_grammar_or_a_schema(serve: Serve) -> None:
    server = serve(lambda *_: "maybe")
    assert post(server, "/completion", prompt="x", grammar='root ::= "yes" | "no"', n_predict=8)["content"] in (
        "yes",
        "no",
    )
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(post(server, "/completion", prompt="x", json_schema=schema, n_predict=32)["content"]) == {"a": 1}
    for wrong, field in (({"grammar": "root ::= ("}, "grammar"), ({"json_schema": {"type": "no"}}, "json_schema")):
        assert server.post("/completion", {"prompt": "x", **wrong}).json()["error"]["param"] == field
    both = server.post("/completion", {"prompt": "x", "grammar": "x", "json_schema": {}})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "json_schema")


@pytest.mark.parametrize("prompt", ["abc", ["abc", "abd"]])
def test_a_prompt_can_be_computed_without_an_answer(server: TestServer, prompt: Any) -> None:
    told = post(server, "/completion", prompt=prompt, n_predict=0, n_probs=1)
    for one in told if isinstance(told, list) else [told]:
        assert (one["content"], one["tokens_predicted"], one["stop_type"]) == ("", 0, "limit")
        assert (one["tokens_evaluated"], one["generation_settings"]["n_predict"]) == (3, 0)
    if isinstance(prompt, str):
        (event,) = server.events("/completion", {"prompt": prompt, "n_predict": 0})
        assert (event["content"], event["tokens_predicted"], event["stop_type"]) == ("", 0, "limit")


def test_a_chat_follows_llama_cpps_grammar_or_schema(serve: Serve) -> None:
    server = serve(lambda *_: "maybe")

    def said(**fields: Any) -> str:
        body = post(server, "/v1/chat/completions", messages=CHAT, max_tokens=32, **fields)
        assert "warnings" not in body
        text: str = body["choices"][0]["message"]["content"]
        return text

    assert said(grammar='root ::= "yes" | "no"') in ("yes", "no")
    assert said(json_schema={"const": "42"}) == '"42"'
    assert said(response_format={"type": "json_object", "schema": {"const": "42"}}) == '"42"'
    assert said(grammar="", json_schema={}) == "maybe"
    for fields, field in (
        ({"grammar": "root ::= (", "json_schema": {}}, "grammar"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"grammar": 'root ::= "a"', "json_schema": {"const": 1}}, "json_schema"),
    ):
        answer = server.post("/v1/chat/completions", {"messages": CHAT, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_completion_tells_settings_times_and_the_prompt(server: TestServer) -> None:
    body = post(server, "/completion", prompt="abc", n_predict=4, temperature=0.5, seed=7)
    settings, timings = body["generation_settings"], body["timings"]
    assert (settings["n_predict"], settings["temperature"], settings["seed"]) == (4, 0.5, 7)
    assert (body["prompt"], body["has_new_line"]) == ("abc", False)
    assert (timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]) == (3, 4)
    assert timings["prompt_ms"] >= 0
    assert timings["predicted_per_second"] >= 0
    one = post(server, "/completion", prompt="abc", n_predict=1)["timings"]
    assert (one["predicted_n"], one["predicted_per_second"], one["predicted_per_token_ms"]) == (1, 0.0, 0.0)
    few = post(
        server, "/completion", prompt="abc", n_predict=4, response_fields=["content", "timings/predicted_n", "x"]
    )
    assert few == {"content": body["content"], "timings/predicted_n": 4}


def test_completion_returns_probabilities(server: TestServer) -> None:
    body = post(server, "/completion", prompt="abc", n_predict=3, n_probs=2)
    probabilities = body["completion_probabilities"]
    assert [one["id"] for one in probabilities] == list(ids(" an"))
    for one in probabilities:
        assert one["bytes"] == list(one["token"].encode())
        assert one["logprob"] <= 0
        assert [set(top) for top in one["top_logprobs"]] == [{"id", "token", "logprob", "bytes"}] * 2
    with server.client() as client:
        answer = client.post("/completion", json={"prompt": "abc", "n_predict": 3, "n_probs": 2, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [one for event in events for one in event["completion_probabilities"]] == probabilities
    assert "completion_probabilities" not in post(server, "/completion", prompt="abc", n_predict=3, n_probs=0)


def test_completion_answers_several_prompts_with_a_list(server: TestServer) -> None:
    bodies = post(server, "/completion", prompt=["abc", "d"], n_predict=64)
    assert [(body["content"], body["index"]) for body in bodies] == [(" answer 0 to <abc>", 0), (" answer 0 to <d>", 1)]
    assert post(server, "/completion", prompt=["abc"], n_predict=64)["content"] == " answer 0 to <abc>"
    streamed = server.post("/completion", {"prompt": ["a", "b"], "stream": True})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("bias", "meant"),
    [
        ([["ab", False], [7, 1.5]], {**dict.fromkeys(ids("ab"), -100.0), 7: 1.5}),
        ({"ab": -2, "7": 1}, {**dict.fromkeys(ids("ab"), -2.0), 7: 1.0}),
        ([["7", 1]], dict.fromkeys(ids("7"), 1.0)),
    ],
)
def test_a_bias_names_tokens_by_id_or_text(server: TestServer, bias: Any, meant: dict[int, float]) -> None:
    assert sampled_with(server, "/completion", {"prompt": "x", "logit_bias": bias}).logit_bias == meant


@pytest.mark.parametrize("bias", [3, [3], [["a"]], [["", 1]], [[-1, 1]], {"a": "x"}, [["a", 101]], {"a": True}])
def test_a_bias_that_is_none_is_refused(server: TestServer, bias: Any) -> None:
    answer = server.post("/completion", {"prompt": "x", "logit_bias": bias})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("logit_bias")


def test_tokenize_and_detokenize_know_llama_cpps_names(server: TestServer) -> None:
    tokens = post(server, "/tokenize", content="hé")["tokens"]
    assert tokens == list(ids("hé"))
    assert post(server, "/detokenize", tokens=tokens)["content"] == "hé"
    pieces = post(server, "/tokenize", content="hé", with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    raw = [piece["piece"] for piece in pieces]
    assert b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in raw) == "hé".encode()
    assert post(server, "/tokenize", content="")["tokens"] == []
    both = server.post("/tokenize", {"content": "a", "prompt": "a"})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "prompt")


def test_errors_name_llama_cpps_fields(server: TestServer) -> None:
    for body, field in (
        ({}, "prompt"),
        ({"prompt": "x", "n_predict": -7}, "n_predict"),
        ({"prompt": "x", "repeat_penalty": 0}, "repeat_penalty"),
    ):
        answer = server.post("/completion", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_templates_properties_and_slots(server: TestServer) -> None:
    assert post(server, "/apply-template", messages=CHAT) == {"prompt": "user:hi\nbot:"}
    props = server.get("/props").json()
    assert (props["total_slots"], props["chat_template"]) == (8, TEMPLATE)
    assert props["model_path"] == props["model_alias"]
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert server.get("/slots").json() == [{"id": place, "n_ctx": 512, "is_processing": False} for place in range(8)]


def test_slots_and_load_show_what_runs(serve: Serve) -> None:
    server = serve(lambda *_: "x" * 300, step_seconds=0.05)
    assert server.get("/load").json() == {"server_load": 0}
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 300}),
    ):
        server.wait(lambda: server.get("/slots").json()[0]["is_processing"])
        assert server.get("/load").json() == {"server_load": 1}


def test_small_pages(server: TestServer) -> None:
    assert server.get("/ping").json() == {"status": "ok"}
    info = server.get("/tokenizer_info").json()
    assert (info["eos_token"], info["model_max_length"], info["chat_template"]) == ("<end>", 512, TEMPLATE)
    assert info["added_tokens_decoder"] == {str(EOS_ID): {"content": "<end>", "special": True}}


# --------------------------------------------------------------------------------------------------------------- infill
def coder(marks: Marks) -> Tokenizer:
    """A tokenizer of bytes with the marks of a family."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = [name for name in (marks.prefix, marks.suffix, marks.middle, marks.file, *marks.ends) if name]
    backend.add_special_tokens(["<end>", *names])
    return Tokenizer(backend, SpecialTokens(bos_id=None, eos_ids=(backend.token_to_id("<end>"),), chat_template=None))


def found_format(marks: Marks) -> InfillFormat:
    found = infill_format(coder(marks))
    assert found is not None
    return found


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.prefix)
def test_every_family_is_known_by_its_tokens_and_prompted_in_its_order(marks: Marks) -> None:
    form = found_format(marks)
    assert form.marks == marks
    text = form.tokenizer.decode(form.prompt("def f(", "return x"), skip_special_tokens=False)
    before, after = f"{marks.prefix}def f(", f"{marks.suffix}return x"
    assert text == (after + before if marks.is_suffix_first else before + after + marks.middle)
    assert set(map(form.tokenizer.raw_token, form.stop_ids)) >= {marks.prefix, marks.suffix}


def test_other_files_go_before_the_gap() -> None:
    marks = FAMILIES[0]
    form = found_format(marks)
    text = form.tokenizer.decode(form.prompt("a", "b", [("x.py", "X = 1")]), skip_special_tokens=False)
    assert text == f"{marks.file}x.py\nX = 1\n{marks.file}{marks.prefix}a{marks.suffix}b{marks.middle}"


def test_a_model_without_such_tokens_refuses_a_suffix_clearly(server: TestServer) -> None:
    for path, body, field in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ):
        error = server.post(path, body).json()["error"]
        assert error["param"] == field
        assert "fills in the middle" in error["message"]
    assert post(server, "/v1/completions", prompt="a", suffix="")["choices"]


def test_a_suffix_and_an_infill_request_give_the_model_both_sides(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def script(prompt: str, index: int) -> str:
        asked.append(prompt)
        return " middle"

    server = serve(script)

    class Fake:
        stop_ids = (ids("~")[0],)

        def prompt(self, prefix: str, suffix: str, files: Any) -> tuple[int, ...]:
            return tuple(ids(f"<{prefix}|{suffix}|{files}>"))

    server.service.texts.infill = Fake()  # type: ignore[assignment]
    answer = post(server, "/v1/completions", prompt=["a", "b"], suffix="z")
    assert [choice["text"] for choice in answer["choices"]] == [" middle", " middle"]
    extra = [{"filename": "f", "text": "t"}]
    body = post(server, "/infill", input_prefix="p", input_suffix="s", prompt="q", input_extra=extra)
    assert body["content"] == " middle"
    ollama = post(server, "/api/generate", prompt="x", suffix="y", stream=False)
    assert (ollama["response"], "context" in ollama) == (" middle", False)
    assert sorted(asked) == sorted(["<a|z|()>", "<b|z|()>", "<pq|s|[('f', 't')]>", "<x|y|()>"])
    for change, field in (({"echo": True}, "echo"), ({"prompt": [1]}, "prompt")):
        refusal = server.post("/v1/completions", {"prompt": "a", "suffix": "z", **change})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, field)


def test_members_that_llama_cpps_clients_always_send_pass_and_those_that_would_change_the_answer_are_refused(
    server: TestServer,
) -> None:
    usual = {
        "id_slot": -1,
        "n_keep": 0,
        "n_discard": 0,
        "min_keep": 0,
        "repeat_last_n": -1,
        "mirostat": 0,
        "n_indent": 0,
    }
    strict = {"X-Quire-Strict": "1"}
    answer = server.post(
        "/completion", {"prompt": "abc", "typical_p": 1.0, "dynatemp_range": 0, **usual}, headers=strict
    )
    assert answer.status_code == 200, answer.text
    assert server.post("/completion", {"prompt": "abc", "samplers": ["top_k", "temperature"]}).status_code == 200
    for name, value in (
        ("lora", [{"id": 0}]),
        ("n_cmpl", 2),
        ("n_indent", 4),
        ("t_max_predict_ms", 5),
        ("mirostat", 2),
    ):
        refused = server.post("/completion", {"prompt": "abc", name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
