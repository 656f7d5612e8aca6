"""`quire chat` and `quire complete` with --url, against a scripted server."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from quire.serving.cli import answer as answer_module
from quire.serving.cli import chat as chat_module
from quire.serving.cli import main
from quire.serving.cli.answer import write_answer
from quire.serving.cli.remote import RemoteAnswerer
from stub_openai import Stub, serve_stub


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serve_stub(Stub()) as started:
        yield started


def test_complete_streams_what_the_server_says(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "count", "--url", stub.url, "--top-k", "5", "--stop", "ten", "--seed", "-1"]) == 0
    assert capsys.readouterr().out == "one two three\n"
    (asked,) = stub.asked
    assert asked["path"] == "/v1/completions"
    assert asked["stream"] is True
    sampling = {"temperature": 0.0, "max_tokens": 128, "top_k": 5, "stop": ["ten"]}
    assert {name: asked[name] for name in sampling} == sampling
    assert asked["model"] == "stub-model"
    assert "seed" not in asked


def test_several_samples_come_in_one_answer(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "count", "-n", "2", "--url", f"{stub.url}/v1/", "--model", "mine"]) == 0
    assert capsys.readouterr().out == "--- 1 of 2\none two three0\n--- 2 of 2\none two three1\n"
    assert (stub.asked[0]["n"], stub.asked[0]["model"]) == (2, "mine")


def test_a_conversation_is_sent_whole_each_time(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["a", "b", "/exit"])
    monkeypatch.setattr(chat_module, "read_piped", lambda: None)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "--url", stub.url.removeprefix("http://"), "--system-prompt", "be brief"]) == 0
    assert capsys.readouterr().out == "one two three\n" * 2
    assert [message["role"] for message in stub.asked[1]["messages"]] == ["system", "user", "assistant", "user"]


def test_a_conversation_goes_on_after_the_server_failed(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(prompt: str) -> str:
        line = next(lines)
        stub.refuse = (503, {"error": {"message": "the engine restarts"}}) if line == "a" else None
        return line

    lines = iter(["a", "b", "/exit"])
    monkeypatch.setattr(chat_module, "read_piped", lambda: None)
    monkeypatch.setattr("builtins.input", ask)
    assert main(["chat", "--url", stub.url]) == 0
    captured = capsys.readouterr()
    assert captured.out == "one two three\n"
    assert "the engine restarts (status 503)" in captured.err
    assert [message["content"] for message in stub.asked[1]["messages"]] == ["b"]


def test_a_key_is_sent_from_the_flag_or_the_environment(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.key = "secret-key"
    assert main(["complete", "p", "--url", stub.url]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "a valid API key is needed; give the right --api-key" in error
    assert main(["complete", "p", "--url", stub.url, "--api-key", "secret-key"]) == 0
    monkeypatch.setenv("QUIRE_API_KEY", "secret-key")
    assert main(["complete", "p", "--url", stub.url]) == 0


@pytest.mark.parametrize(
    ("status", "said", "code", "shown"),
    [
        (400, {"error": {"message": "temperature: must be in [0, 2]"}}, 2, "temperature: must be in [0, 2]"),
        (404, {"detail": "no such\nmodel"}, 2, "no such model"),
        (429, {"error": {"message": "the queue is full"}}, 1, "the queue is full (status 429); try again in 2 s"),
        (503, {}, 1, "no reason given (status 503)"),
    ],
)
def test_a_refusal_is_one_line(
    stub: Stub, capsys: pytest.CaptureFixture[str], status: int, said: dict[str, object], code: int, shown: str
) -> None:
    stub.refuse = (status, said)
    assert main(["complete", "p", "--url", stub.url]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.endswith(f"{stub.url}: {shown}\n")


@pytest.mark.parametrize(
    ("behaviour", "shown"),
    [({"fail_after": 2}, "the engine was restarted"), ({"cut_after": 2}, "ended its answer before it was complete")],
)
def test_an_answer_that_breaks_off_says_so_after_what_came(
    stub: Stub, capsys: pytest.CaptureFixture[str], behaviour: dict[str, int], shown: str
) -> None:
    vars(stub).update(behaviour)
    assert main(["complete", "p", "--url", stub.url]) == 1
    captured = capsys.readouterr()
    assert captured.out == "one two "
    assert shown in captured.err


def test_leaving_an_answer_hangs_up(stub: Stub) -> None:
    stub.words, stub.pause = ["word "] * 2_000, 0.005
    arguments = {"url": stub.url, "api_key": None, "model": None, "seed": None, "stop": None}
    pieces = RemoteAnswerer(answer_module.argparse.Namespace(**arguments)).complete("p")
    assert next(pieces).text == "word "
    pieces.close()
    assert stub.hung_up.wait(60)


def test_an_interrupt_keeps_what_came(stub: Stub) -> None:
    def interrupted() -> answer_module.Pieces:
        yield answer_module.Piece("so far", 2)
        raise KeyboardInterrupt

    answer: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        write_answer(interrupted(), answer)
    assert answer == ["so far"]


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # it is taken, and nobody listens
        assert main(["chat", "hello", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"quire: error: {url} cannot be reached")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--url", "ftp://host"], "url: 'ftp://host' is not the address"),
        (["--url", "http://host:port"], "url: 'http://host:port' is not the address"),
        (["--url", "http://[::1:8000"], "url: 'http://[::1:8000' is not the address"),
        (["--url", "http://host:0"], "url: 'http://host:0' is not the address"),
        (["--url", "http://me:secret@host"], "is not the address of a server"),
        (["--url", "http://h", "--dtype", "float32"], "dtype: is a setting of the server"),
        (["--url", "http://h", "--load-format", "dummy"], "load_format: is a setting of the server"),
        (["--api-key", "k"], "api_key: is for a server; give --url too"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    arguments: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["complete", "p", *arguments]) == 2
    assert cause in capsys.readouterr().err
