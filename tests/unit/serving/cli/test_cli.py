from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from quire import __version__
from quire.runtime.loading import resolve
from quire.serving.cli import _parser, main
from quire.serving.cli import answer as answer_module
from quire.serving.cli import chat as chat_module
from quire.serving.cli import pull as pull_module
from quire.serving.cli.arguments import engine_settings, sampling_params
from quire.serving.cli.serve import read_limits
from quire.serving.cli.suggestions import COMMANDS, FLAGS
from quire.serving.cli.vllm_flags import HIGHEST_LOGPROBS
from quire.serving.terminal import LoadingProgress
from quire.types.errors import ModelLoadError
from quire.types.sampling import SamplingParams
from quire.types.sampling_defaults import SamplingDefaults
from tests.unit.serving.conftest import MakeLLM


def echo(prompt: str, index: int) -> str:
    return f"<{prompt}>"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, make_llm: MakeLLM) -> None:
    monkeypatch.setattr(answer_module, "load", lambda args: make_llm(echo))


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"quire {__version__}\n"
    project = Path(__file__).parents[4] / "pyproject.toml"
    assert f'version = "{__version__}"' in project.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ([], "COMMAND"),
        (["sing"], "invalid choice"),
        (["complete", "--max-tokens", "many"], "--max-tokens"),
        (["complete", "p", "--no-such-flag"], "--no-such-flag"),
        (["complete", "p", "--temp", "0"], "--temp"),
        (["doctor", "--tokenizer", "t"], "--tokenizer"),
        (["doctor", "--load-format", "dummy"], "--load-format"),
        (["doctor", "--verbose"], "--verbose"),
        (["serve", "--api-wrokers", "2"], "--api-wrokers"),
        (["serve", "--log-format", "xml"], "--log-format"),
        (["bench"], "KIND"),
        (["bench", "serve", "--rate", "fast"], "--rate"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(
    arguments: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert cause in error
    assert "--help" in error


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["serv"], "did you mean serve?"),
        (["run", "smollm2"], "did you mean chat?"),
        (["generate"], "did you mean complete?"),
        (["bench", "serv"], "did you mean serve?"),
        (["serve", "--log-format", "jsn"], "did you mean json?"),
        (["complete", "p", "--max-token", "5"], "did you mean --max-tokens instead of --max-token?"),
        (["chat", "--system", "x"], "did you mean --system-prompt instead of --system?"),
        (["chat", "--temp=0.5"], "did you mean --temperature instead of --temp?"),
        (["serve", "--ctx-size", "4096"], "did you mean --max-model-len instead of --ctx-size?"),
        (["serve", "--ctx-sz", "4096"], "did you mean --max-model-len instead of --ctx-sz?"),
        (["serve", "-ngl", "99", "--parallel", "4"], "did you mean --max-num-seqs instead of --parallel?"),
        (["serve", "--data-parallel-size", "2"], "data_parallel_size: 2 is not supported; set it to 1 and start one"),
        (["serve", "--fully-sharded-loras"], "adapters are on one device"),
        (["pull", "--trust-remote-code"], "unrecognized arguments: --trust-remote-code"),
    ],
)
def test_what_is_unknown_is_answered_with_what_may_be_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert meant in error
    assert error.count("\n") == 1


def test_flags_of_vllm_that_ask_for_nothing_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    habits = "--data-parallel-size 1 -dp=1 --disable-log-requests --enable-chunked-prefill --no-enable-eplb"
    args = _parser().parse_args(["serve", *habits.split(), "m", "--max-num-seqs", "3"])
    assert (args.model_name, args.max_num_seqs) == ("m", 3)
    assert not caplog.records
    assert vars(args) == vars(_parser().parse_args(["serve", "m", "--max-num-seqs", "3"]))
    _parser().parse_args(["serve", "m", "--trust-remote-code"])
    assert "no code from a model's files is ever run" in caplog.text


def test_flags_of_vllms_server_start_a_server_where_they_ask_for_what_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    habits = (
        "--enable-auto-tool-choice --tool-call-parser hermes --enable-prompt-tokens-details --enable-request-id-headers"
    )
    args = _parser().parse_args(["serve", "m", *habits.split(), "--disable-uvicorn-access-log", "--middleware=[]"])
    assert vars(args) == vars(_parser().parse_args(["serve", "m", "--tool-call-parser", "hermes"]))
    assert not caplog.records
    _parser().parse_args(["serve", "m", "--uvicorn-log-level", "warning"])
    assert "use --log-level" in caplog.text


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ("serve m --return-tokens-as-token-ids", "send return_tokens_as_token_ids with each request"),
        ("serve m --middleware my.module", "put a proxy before the server"),
        ("chat --enable-auto-tool-choice", "unrecognized arguments"),
    ],
)
def test_flags_of_vllms_server_that_would_be_missed_are_refused(
    flags: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(flags.split())
    assert advice in capsys.readouterr().err


def test_flags_with_underscores_and_members_of_objects_are_spellings_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    words = "--max_model_len 5000 --max_num_seqs=3 --no_enable_prefix_caching --served-model-name max_tokens"
    args = _parser().parse_args(["serve", "m", *words.split()])
    assert (args.max_model_len, args.max_num_seqs, args.enable_prefix_caching) == (5000, 3, False)
    assert args.served_model_name == [["max_tokens"]]
    words = "--speculative-config.method ngram --speculative_config.num-speculative-tokens=4"
    args = _parser().parse_args(["serve", "m", *words.split()])
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}
    assert not caplog.records
    words = "--structured-outputs-config.backend xgrammar --reasoning-config.a.b 1"
    _parser().parse_args(["serve", "m", *words.split()])
    assert "structured_outputs_config={'backend': 'xgrammar'} has no effect" in caplog.text
    assert "reasoning_config={'a': {'b': 1}} has no effect" in caplog.text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--speculative-config {} --speculative-config.method ngram", "is given both whole and by members"),
        ("--speculative-config.a 1 --speculative-config.a.b 1", "is given both whole and by members"),
        ("--no-such.flag 1", "unrecognized arguments: --no-such.flag"),
        ("--task embed --convert classify", "convert: is 'classify', but task is 'embed'"),
        ("--runner draft", "runner: 'draft' is unknown"),
    ],
)
def test_spellings_that_contradict_are_refused(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["serve", "m", *flags.split()])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "task"),
    [("--runner pooling", "pooling"), ("--runner pooling --convert embed", "embed"), ("--runner generate", "generate")],
)
def test_vllms_runner_and_convert_set_the_task(flags: str, task: str) -> None:
    assert _parser().parse_args(["serve", "m", *flags.split()]).task == task


def test_vllms_max_logprobs_is_a_limit_of_a_server() -> None:
    def limit(*flags: str) -> int:
        return read_limits(_parser().parse_args(["serve", "m", *flags]).limit)["logprobs"]

    assert limit("--max-logprobs", "50") == 50
    assert limit("--max-logprobs=-1") == HIGHEST_LOGPROBS


def test_flags_of_vllm_with_another_name_are_translated() -> None:
    args = _parser().parse_args(["serve", "org/name", "--revision", "v1", "--num-gpu-blocks-override", "7"])
    assert args.model_name == "org/name@v1"
    assert engine_settings(args)["num_kv_blocks"] == 7
    assert _parser().parse_args(["chat", "-m", "org/name", "--revision=v1"]).model == "org/name@v1"


def test_every_suggestion_is_a_command_or_a_flag() -> None:
    parsers = list(_parsers(_parser()))
    commands = {parser.prog.removeprefix("quire ") for parser in parsers}
    flags = {flag for parser in parsers for flag in parser._option_string_actions}
    assert set(COMMANDS.values()) <= commands
    assert set(FLAGS.values()) <= flags
    assert not set(COMMANDS) & commands


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


@pytest.mark.parametrize("parser", list(_parsers(_parser())), ids=lambda parser: parser.prog)
def test_every_help_explains_every_flag_and_has_examples_that_parse(parser: argparse.ArgumentParser) -> None:
    assert all(action.help for action in parser._actions if not isinstance(action, argparse._SubParsersAction))
    assert parser.epilog is not None
    commands = [line.strip() for line in parser.epilog.splitlines() if line.startswith("  quire")]
    assert commands
    for command in commands:
        words = shlex.split(command.partition(" <")[0])[1:]
        if words[0] != "COMMAND":
            _parser().parse_args(words)
    assert parser.format_help()


@pytest.mark.parametrize(
    ("command", "flag", "default"),
    [
        ("quire bench serve", "--num-prompts", "100"),
        ("quire bench throughput", "--num-prompts", "64"),
        ("quire serve", "--max-num-seqs", "64 on a CPU, 256 on a GPU"),
        ("quire serve", "--max-num-batched-tokens", "512 on a CPU"),
        ("quire serve", "--kv-cache-memory", "1GiB"),
        ("quire serve", "--files-dir", "they end with the server"),
        ("quire serve", "--limit", "docs/reference/http_api.md"),
    ],
)
def test_the_help_of_a_flag_tells_its_default(command: str, flag: str, default: str) -> None:
    (parser,) = (one for one in _parsers(_parser()) if one.prog == command)
    assert default in (parser._option_string_actions[flag].help or "")


def test_the_reference_names_every_command_and_every_flag() -> None:
    text = (Path(__file__).parents[4] / "docs/reference/cli.md").read_text(encoding="utf-8")
    for parser in _parsers(_parser()):
        assert f"`{parser.prog}`" in text or parser.prog == "quire", parser.prog
        for action in parser._actions:
            for flag in action.option_strings:
                assert flag in ("-h", "--help") or f"`{flag}`" in text, (parser.prog, flag)
    known = {flag for parser in _parsers(_parser()) for flag in parser._option_string_actions}
    foreign = {flag for flag in re.findall(r"`(--[a-z-]+)`", text) if flag not in known}
    assert not foreign


@pytest.mark.usefixtures("scripted")
class TestWithAModel:
    def test_complete_continues_the_prompt(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["complete", "hello"]) == 0
        assert capsys.readouterr().out == "<hello>\n"

    def test_complete_gives_several_samples(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["complete", "hello", "-n", "2", "--temperature", "1", "--seed", "3"]) == 0
        assert capsys.readouterr().out == "--- 1 of 2\n<hello>\n--- 2 of 2\n<hello>\n"

    def test_chat_samples_as_the_models_makers_recommend(
        self, monkeypatch: pytest.MonkeyPatch, make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]
    ) -> None:
        defaults = SamplingDefaults(temperature=0.3, top_k=5, max_tokens=2)
        llm = make_llm(echo, defaults=defaults)
        seen: list[SamplingParams] = []
        stream_chat = llm.stream_chat
        monkeypatch.setattr(llm, "stream_chat", lambda messages, own: seen.append(own) or stream_chat(messages, own))
        monkeypatch.setattr(answer_module, "load", lambda args: nullcontext(llm))
        assert main(["chat", "hello"]) == 0
        assert main(["chat", "hello", "--temperature", "0", "--max-tokens", "9"]) == 0
        assert [(one.temperature, one.top_k, one.max_tokens) for one in seen] == [(0.3, 5, 512), (0.0, 5, 9)]
        assert "<user:hello" in capsys.readouterr().out

    def test_complete_stops_where_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["complete", "hello", "--stop", "ll"]) == 0
        assert capsys.readouterr().out == "<he\n"

    def test_a_piped_prompt_is_read(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
        assert main(["complete"]) == 0
        assert capsys.readouterr().out == "<from a pipe>\n"

    @pytest.mark.parametrize("command", ["complete", "chat"])
    @pytest.mark.parametrize(
        ("stdin", "cause"),
        [
            (None, "stdin: is closed"),
            (io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"), "stdin: is not UTF-8 text"),
            (io.StringIO("caf\udce9"), "stdin: is not UTF-8 text"),
        ],
    )
    def test_a_pipe_without_text_is_one_line_and_exit_code_two(
        self,
        command: str,
        stdin: io.TextIOBase | None,
        cause: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if stdin is not None:
            stdin.seek(0)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main([command]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"quire: error: {cause}")
        assert error.count("\n") == 1

    def test_chat_answers_one_message(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["chat", "hello", "--system-prompt", "be brief"]) == 0
        assert capsys.readouterr().out == "<system:be brief\nuser:hello\nbot:>\n"

    def test_a_refused_request_is_one_line_and_exit_code_two(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["complete", "x" * 300]) == 2
        error = capsys.readouterr().err
        assert error.startswith("quire: error: prompt: has 300 tokens")
        assert error.count("\n") == 1
        assert main(["complete", "x", "--temperature", "-1"]) == 2
        assert main(["chat", " "]) == 2

    def test_debug_shows_the_traceback(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["complete", "x" * 300, "--debug"]) == 2
        assert "Traceback" in capsys.readouterr().err

    def test_a_conversation_remembers_until_it_is_reset(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = iter(["a", "", "b", "/help", "/nonsense", "/reset", "c", "/exit"])
        monkeypatch.setattr(chat_module, "read_piped", lambda: None)
        monkeypatch.setitem(sys.modules, "readline", None)  # a Python without it converses too
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
        assert main(["chat"]) == 0
        captured = capsys.readouterr()
        first, rest = captured.out.split("\n<", 1)[0], captured.out
        assert first == "<user:a\nbot:>"
        assert "user:a\nassistant:<user:a\nbot:>\nuser:b\nbot:>" in rest
        assert rest.endswith("<user:c\nbot:>\n")
        assert "/nonsense is not a command" in captured.err

    def test_a_message_too_long_for_the_conversation_is_forgotten(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = iter(["x" * 300, "a"])
        monkeypatch.setattr(chat_module, "read_piped", lambda: None)

        def ask(prompt: str) -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", ask)
        assert main(["chat"]) == 0
        captured = capsys.readouterr()
        assert captured.out == "<user:a\nbot:>\n"
        assert "/reset" in captured.err


def test_an_unexpected_error_is_one_line_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> None:
        raise RuntimeError("lost\nthe thread")

    monkeypatch.setattr(answer_module, "load", fail)
    assert main(["complete", "p"]) == 1
    assert capsys.readouterr().err == (
        "quire: error: unexpected RuntimeError: lost the thread; run again with --debug for the traceback\n"
    )


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(answer_module, "load", interrupt)
    assert main(["complete", "p"]) == 130
    assert capsys.readouterr().err == "\n"


def test_the_package_runs_as_a_module() -> None:
    source = Path(__file__).parents[4] / "src"
    done = subprocess.run(
        [sys.executable, "-m", "quire", "--version"], capture_output=True, text=True, check=True, cwd=source
    )
    assert done.stdout == f"quire {__version__}\n"


@pytest.mark.parametrize(("given", "seed"), [("-1", None), ("0", 0), ("7", 7)])
def test_a_seed_goes_to_the_engine_unless_it_means_any(given: str, seed: int | None) -> None:
    args = _parser().parse_args(["complete", "p", "--seed", given])
    assert engine_settings(args) == ({} if seed is None else {"seed": seed})
    assert sampling_params(args).seed == seed


def test_progress_of_a_pull_ends_its_line_when_the_pull_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: str, *, recheck: bool, progress: LoadingProgress) -> None:
        progress("fetching", 1, 2)
        raise ModelLoadError("m", "is broken")

    monkeypatch.setattr(resolve, "resolve_model", fail)
    monkeypatch.setattr(pull_module, "LoadingProgress", lambda: LoadingProgress(shown=True))
    assert main(["pull", "m"]) == 1
    assert capsys.readouterr().err.endswith("1/2\nquire: error: m: is broken\n")
