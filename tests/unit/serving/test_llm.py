from __future__ import annotations

import copy
import gc
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.serving import assembly as assembly_module
from quire.serving import batch as batch_module
from quire.serving import llm as llm_module
from quire.serving.requests import TextPrompt, TokensPrompt
from quire.serving.terminal import LoadingProgress
from quire.types.errors import ConfigError, EngineDead, InvalidRequest, QuireError
from quire.types.sampling import SamplingParams
from quire.types.sampling_defaults import SamplingDefaults
from tests.unit.serving.conftest import MakeLLM
from tests.unit.serving.scripted import ScriptedExecutor, ids

LONG = SamplingParams(max_tokens=100)


def echo(prompt: str, index: int) -> str:
    return f"<{prompt}>"


def test_prompts_of_every_form_are_answered_in_order(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    prompts: list[Any] = ["text", ids("ids"), {"prompt": "dict"}, {"prompt_token_ids": ids("both")}]
    outputs = llm.generate(prompts, LONG)
    assert [output.outputs[0].text for output in outputs] == ["<text>", "<ids>", "<dict>", "<both>"]
    assert [output.prompt for output in outputs] == ["text", None, "dict", None]
    assert outputs[1].prompt_token_ids == ids("ids")
    assert all(output.finished for output in outputs)


def test_python_collects_no_garbage_by_itself_while_prompts_are_answered(make_llm: MakeLLM) -> None:
    seen = []

    def watch(prompt: str, index: int) -> str:
        seen.append(gc.isenabled())
        return prompt

    llm, was_enabled = make_llm(watch), gc.isenabled()
    gc.enable()
    try:
        llm.generate(["a", "b"], LONG)
        assert gc.isenabled()
    finally:
        if not was_enabled:
            gc.disable()
    assert seen
    assert not any(seen)


def test_prompts_may_come_from_any_iterable(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    prompts: list[Any] = [
        (text for text in ("a", "b")),
        map(str.upper, ["x", "y"]),
        ({"prompt": text, "cache_salt": "s", "multi_modal_data": None} for text in "pq"),
        iter([TokensPrompt(prompt_token_ids=ids("t"), prompt="shown"), TextPrompt(prompt="u")]),
    ]
    answers = [[output.outputs[0].text for output in llm.generate(each, LONG)] for each in prompts]
    assert answers == [["<a>", "<b>"], ["<X>", "<Y>"], ["<p>", "<q>"], ["<t>", "<u>"]]
    assert llm.generate(TokensPrompt(prompt_token_ids=ids("t"), prompt="shown"), LONG)[0].prompt == "shown"


def test_prompts_with_different_salts_share_no_cached_prefix(make_llm: MakeLLM) -> None:
    llm = make_llm(echo, block_size=4)
    one = TextPrompt(prompt="x" * 40, cache_salt="one")
    assert [llm.generate(prompt, LONG)[0].num_cached_tokens > 0 for prompt in (one, one)] == [False, True]
    assert llm.generate(TextPrompt(prompt="x" * 40, cache_salt="two"), LONG)[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"bytes", "^prompts: cannot be a bytes"),
        (5, "^prompts: cannot be a int"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, r"^multi_modal_data: this model takes text only"),
        ({"prompt": "a", "multi_modal_data": {"audio": 1}}, r"^prompts\.multi_modal_data\.audio: is not supported"),
        ({"prompt": "a", "cache_salt": 5}, r"^prompts\.cache_salt: must be text"),
        ({"prompt_embeds": [1.0]}, r"^prompts\.prompt_embeds"),
        ({}, "^prompts: has neither"),
        ([{"prompt": 5}], r"^prompts\[0\]\.prompt: must be text"),
    ],
)
def test_prompts_that_are_none_are_refused_by_name(make_llm: MakeLLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_llm(echo).generate(prompt, LONG)


def test_without_sampling_the_models_own_defaults_hold(make_llm: MakeLLM) -> None:
    llm = make_llm(lambda prompt, index: "x" * 50, defaults=SamplingDefaults(max_tokens=3, temperature=0.5))
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3, temperature=0.5)
    assert llm.generate("p")[0].outputs[0].text == "xxx"
    assert llm.generate("p")[0].sampling == llm.get_default_sampling_params()
    assert llm.chat([{"role": "user", "content": "c"}])[0].outputs[0].text == "xxx"
    assert "".join(piece.text for piece in llm.stream("p")) == "xxx"
    assert llm.start("p").wait().outputs[0].text == "xxx"
    given = SamplingParams(max_tokens=4)
    assert llm.generate("p", given)[0].sampling == given


def test_one_prompt_needs_no_list(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    assert llm.generate("one", LONG)[0].outputs[0].text == "<one>"
    assert llm.generate(ids("two"), LONG)[0].outputs[0].text == "<two>"
    assert llm.generate([], LONG) == []


def test_without_sampling_the_default_is_sixteen_tokens(make_llm: MakeLLM) -> None:
    (output,) = make_llm(lambda prompt, index: "x" * 50).generate("p")
    assert len(output.outputs[0].token_ids) == 16


def test_a_refused_prompt_is_named_and_nothing_runs(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: prompt.*max_model_len"):
        llm.generate(["fine", "x" * 300, "fine"], LONG)
    assert llm.executor.num_launched == 0  # type: ignore[attr-defined]
    assert llm.generate("again", LONG)[0].outputs[0].text == "<again>"
    with pytest.raises(InvalidRequest, match=r"^prompt: is empty"):
        llm.generate("", LONG)


def test_a_batch_of_several_slices_is_answered_in_order(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "_FIRST_SLICE", 2)
    monkeypatch.setattr(batch_module, "_SLICE", 3)
    llm = make_llm(echo, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = [f"prompt {i}" for i in range(20)]
    assert [output.outputs[0].text for output in llm.generate(prompts, LONG)] == [f"<prompt {i}>" for i in range(20)]
    tokenized: list[int] = []
    make = llm._requests.make
    monkeypatch.setattr(llm._requests, "make", lambda *a, **k: tokenized.append(len(a[0])) or make(*a, **k))
    assert len(llm.generate(prompts, LONG)) == 20
    assert tokenized == [2, 2, 3, 3, 3, 3, 3, 1]


def test_a_prompt_refused_in_a_later_slice_is_named_and_leaves_the_engine_usable(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "_FIRST_SLICE", 1)
    monkeypatch.setattr(batch_module, "_SLICE", 1)
    llm = make_llm(echo, max_num_batched_tokens=16, max_num_seqs=4)
    with pytest.raises(InvalidRequest, match=r"^prompts\[9\]: prompt: has 5000 tokens"):
        llm.generate(["some words"] * 9 + ["x" * 5000], LONG)
    assert llm.generate("again", LONG)[0].outputs[0].text == "<again>"


def test_conversations_are_rendered_by_the_models_template(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    hello = [{"role": "user", "content": "hello"}]
    assert llm.chat(hello, LONG)[0].outputs[0].text == "<user:hello\nbot:>"
    outputs = llm.chat([hello, [*hello, {"role": "assistant", "content": "hi"}]], LONG, add_generation_prompt=False)
    assert [output.outputs[0].text for output in outputs] == ["<user:hello\n>", "<user:hello\nassistant:hi\n>"]
    outputs = llm.chat((list(each) for each in (hello, hello)), LONG)
    assert [output.outputs[0].text for output in outputs] == ["<user:hello\nbot:>"] * 2
    own = llm.chat(hello, LONG, chat_template="{{ messages[0].content }}!")
    assert own[0].prompt == "hello!"
    with pytest.raises(InvalidRequest, match=r"^chat_template: 'template.jinja' never reads .* not the path"):
        llm.chat(hello, LONG, chat_template="template.jinja")
    with pytest.raises(InvalidRequest, match=r"^chat_template_kwargs\.tools"):
        llm.chat(hello, LONG, chat_template_kwargs={"tools": []})


def test_a_model_is_neither_pickled_nor_copied(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(QuireError, match="an LLM holds a loaded model .* make one in each process"):
            duplicate(llm)


def test_a_stream_says_the_same_as_generate(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    pieces = list(llm.stream("wörld ☕", LONG))
    assert "".join(piece.text for piece in pieces) == "<wörld ☕>" == llm.generate("wörld ☕", LONG)[0].outputs[0].text
    assert pieces[-1].finish_reason == "stop"
    pieces = list(llm.stream_chat([{"role": "user", "content": "c"}], LONG))
    assert "".join(piece.text for piece in pieces) == "<user:c\nbot:>"


def test_arguments_of_a_wrong_type_are_refused_by_name(make_llm: MakeLLM) -> None:
    llm: Any = make_llm(echo)
    chat = [{"role": "user", "content": "x"}]
    for call, words in (
        (lambda: llm.chat(chat, LONG, chat_template=5), "chat_template: must be text, got int"),
        (lambda: llm.chat(chat, LONG, chat_template_kwargs=5), "chat_template_kwargs: must be an object"),
        (lambda: llm.generate("x", LONG, priority=5), "priority: must be a list, got int"),
        (lambda: llm.generate(["x"], LONG, priority="5"), "priority: must be a list, got str"),
        (lambda: llm.add_lora(5), "lora_request: must be a LoRARequest, got int"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            call()


def test_a_closed_llm_says_so_and_what_to_do(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    (output,) = llm.generate("x", LONG)
    llm.close()
    llm.close()
    chat = [{"role": "user", "content": "x"}]
    for call in (
        lambda: llm.generate("x", LONG),
        lambda: llm.chat(chat, LONG),
        lambda: list(llm.stream("x", LONG)),
        lambda: llm.start("x", LONG),
        lambda: llm.fork(output, 1),
        lambda: llm.embed("x"),
        lambda: llm.register_prefix("name", "x"),
        llm.__enter__,
    ):
        with pytest.raises(EngineDead, match="this LLM was closed; make a new one"):
            call()


def test_a_stream_closed_early_frees_the_engine(make_llm: MakeLLM) -> None:
    llm = make_llm(lambda prompt, index: "x" * 90)
    stream = llm.stream("p", LONG)
    next(stream)
    with pytest.raises(QuireError, match="another call"):
        llm.generate("q", LONG)
    stream.close()
    assert llm.generate("q", SamplingParams(max_tokens=3))[0].outputs[0].text == "xxx"
    assert llm.stats().blocks.used == 0


def test_an_interrupt_ends_what_is_live_and_leaves_the_engine_usable(make_llm: MakeLLM) -> None:
    llm = make_llm(lambda prompt, index: "x" * 90)
    executor = llm.executor  # type: ignore[attr-defined]
    executor.on_launch = lambda: executor.num_launched == 5 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["p"] * 20, LONG)
    assert executor.num_launched == 5
    assert llm.stats().running == llm.stats().waiting == llm.stats().blocks.used == 0
    assert llm.generate("q", SamplingParams(max_tokens=2))[0].outputs[0].text == "xx"


def test_one_failed_request_leaves_the_others_and_a_lone_one_raises(make_llm: MakeLLM) -> None:
    llm = make_llm(echo, fails=frozenset({"bad"}))
    good, bad = llm.generate(["good", "bad"], LONG)
    assert good.outputs[0].text == "<good>"
    assert bad.outputs[0].finish_reason == "error"
    with pytest.raises(QuireError, match="boom"):
        llm.generate("bad", LONG)
    with pytest.raises(QuireError, match="boom"):
        list(llm.stream("bad", LONG))


def test_an_unknown_argument_is_refused_with_the_closest_known_one(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r"max_model_length: is not an argument.*max_model_len\?"):
        make_llm(echo, max_model_length=5)
    with pytest.raises(ConfigError, match=r"load_format"):
        make_llm(echo, load_format="pickle")


def test_settings_reach_the_engine(make_llm: MakeLLM) -> None:
    llm = make_llm(echo, block_size=8, num_kv_blocks=10, max_num_seqs=3, seed=5)
    assert (llm.config.cache.block_size, llm.config.cache.num_blocks) == (8, 10)
    assert (llm.config.scheduler.max_num_seqs, llm.config.scheduler.max_model_len) == (3, 80)
    assert llm.stats().blocks.total == 10


def test_without_a_tokenizer_token_ids_go_in_and_out(make_llm: MakeLLM) -> None:
    llm = make_llm(echo, skip_tokenizer_init=True)
    completion = llm.generate(ids("a"), LONG)[0].outputs[0]
    assert completion.text == ""
    assert completion.token_ids[:3] == ids("<a>")
    streamed = [token for piece in llm.stream(ids("a"), LONG) for token in piece.token_ids]
    assert streamed == completion.token_ids
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.get_tokenizer()


def test_the_plan_and_progress_are_shown_when_asked(make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = make_llm(echo)
    quiet.generate("a", LONG)
    assert capsys.readouterr().err == ""
    with make_llm(echo, verbose=True) as llm:
        llm.generate("a", LONG, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "memory plan" in shown
    assert "generating" in shown
    assert "tokens/s" in shown


def test_the_public_names_are_all_there() -> None:
    assert quire.SamplingParams is SamplingParams
    assert all(getattr(quire, name) is not None for name in quire.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        quire.LMM  # noqa: B018


def test_models_and_tokenizers_may_be_paths_but_not_numbers(make_llm: MakeLLM) -> None:
    llm = make_llm(echo, model=Path("model.gguf"), tokenizer=Path("other"))
    assert llm.generate("a", LONG)[0].outputs[0].text == "<a>"
    for name in ("model", "tokenizer"):
        with pytest.raises(ConfigError, match=f"{name}: cannot be a int; give a path or a name"):
            make_llm(echo, **{name: 5})


def test_sampling_of_another_kind_is_refused_by_name(make_llm: MakeLLM) -> None:
    llm = make_llm(echo)
    for wrong in (5, "greedy", {"temperature": 0}):
        with pytest.raises(InvalidRequest, match="^sampling_params: must be SamplingParams, got "):
            llm.generate("a", wrong)  # type: ignore[arg-type]


def test_an_engine_that_does_not_start_gives_the_executor_back(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[ScriptedExecutor] = []

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no engine")

    monkeypatch.setattr(assembly_module, "EngineCore", fail)
    monkeypatch.setattr(ScriptedExecutor, "close", lambda self: closed.append(self))
    with pytest.raises(RuntimeError, match="no engine"):
        make_llm(echo)
    assert len(closed) == 1


def test_progress_ends_its_line_when_loading_fails(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, progress: LoadingProgress, **options: object) -> None:
        progress("loading", 1, 2)
        raise RuntimeError("half a file")

    make_llm(echo)
    monkeypatch.setattr(assembly_module, "SingleExecutor", fail)
    with pytest.raises(RuntimeError, match="half a file"):
        llm_module.LLM(device="cpu", verbose=True)
    assert capsys.readouterr().err.endswith("loading [##########..........] 1/2\n")
