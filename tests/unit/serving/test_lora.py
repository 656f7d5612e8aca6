"""LoRA adapters in the offline API, and the folders that clients may name."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, BeamSearchParams, ConfigError, InvalidRequest, LoRARequest, SamplingParams
from quire.serving.async_llm import AsyncLLM
from quire.serving.lora import folder_below
from quire.types.adapters import AdapterInfo
from tests.unit.serving.conftest import MakeLLM

SAMPLING = SamplingParams(max_tokens=40)
SQL, CHAT = LoRARequest("sql", 1, "/adapters/sql"), LoRARequest("chat", 2, "/adapters/chat")


def echo(prompt: str, index: int) -> str:
    return f"<{prompt}>"


def texts(outputs: list[object]) -> list[str]:
    return [output.outputs[0].text for output in outputs]  # type: ignore[attr-defined]


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm(echo, enable_lora=True, max_loras=2)


def test_a_prompt_is_answered_with_its_adapter_which_is_loaded_when_it_is_first_named(llm: LLM) -> None:
    assert texts(llm.generate(["a", "b"], SAMPLING, lora_request=SQL)) == ["sql:<a>", "sql:<b>"]
    assert [(info.name, info.folder) for info in llm.list_loras()] == [("sql", "/adapters/sql")]
    outputs = llm.generate(["a", "b", "c"], SAMPLING, lora_request=[SQL, None, CHAT])
    assert texts(outputs) == ["sql:<a>", "<b>", "chat:<c>"]
    assert [output.adapter for output in outputs] == ["sql", "", "chat"]
    assert texts(llm.generate("a", SAMPLING)) == ["<a>"]


def test_every_call_that_generates_takes_an_adapter(llm: LLM) -> None:
    message = [{"role": "user", "content": "hi"}]
    assert texts(llm.chat(message, SAMPLING, lora_request=SQL)) == ["sql:<user:hi\nbot:>"]
    assert "".join(piece.text for piece in llm.stream("a", SAMPLING, lora_request=SQL)) == "sql:<a>"
    assert "".join(piece.text for piece in llm.stream_chat(message, SAMPLING, lora_request=SQL)).startswith("sql:")
    (found,) = llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=20), lora_request=SQL)
    assert "sql:<a>" in (found.sequences[0].text or "")
    live = llm.start("a", SAMPLING, lora_request=SQL)
    assert live.wait().outputs[0].text == "sql:<a>"
    fork = llm.fork(live, 2)
    assert fork.adapter == "sql"
    fork.wait()


def test_adapters_named_at_the_start_need_no_path(make_llm: MakeLLM) -> None:
    llm = make_llm(echo, enable_lora=True, lora_modules={"sql": "/adapters/sql"})
    assert texts(llm.generate("a", SAMPLING, lora_request=LoRARequest("sql"))) == ["sql:<a>"]
    with pytest.raises(ConfigError, match="^lora_modules: 'x'=/adapters/bad: bad is no adapter"):
        make_llm(echo, enable_lora=True, lora_modules={"x": "/adapters/bad"})


def test_what_cannot_be_loaded_is_refused_before_anything_runs(llm: LLM, make_llm: MakeLLM) -> None:
    for given, reason in (
        (LoRARequest("x"), "is not loaded, and no lora_path"),
        (LoRARequest("x", 1, "/adapters/bad"), "bad is no adapter"),
        ([SQL], "has 1 entries for 2 prompts"),
        ("sql", "must be a LoRARequest"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            llm.generate(["a", "b"], SAMPLING, lora_request=given)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="enable_lora"):
        make_llm(echo).generate("a", SAMPLING, lora_request=SQL)


def test_a_name_keeps_its_folder_unless_it_is_loaded_in_place(llm: LLM) -> None:
    llm.add_lora(SQL)
    with pytest.raises(InvalidRequest, match="is loaded from '/adapters/sql'"):
        llm.generate("a", SAMPLING, lora_request=LoRARequest("sql", 1, "/adapters/other"))
    renewed = LoRARequest("sql", 1, "/adapters/other", load_inplace=True)
    assert texts(llm.generate("a", SAMPLING, lora_request=renewed)) == ["other:<a>"]
    assert llm.executor.adapters == {"other"}  # type: ignore[attr-defined]
    assert texts(llm.generate("a", SAMPLING, lora_request=LoRARequest("sql", load_inplace=True))) == ["other:<a>"]
    assert [info.folder for info in llm.list_loras()] == ["/adapters/other"]
    llm.remove_lora("sql")
    with pytest.raises(InvalidRequest, match="^lora_request: 'sql' is not loaded, and no lora_path is given"):
        llm.add_lora(LoRARequest("sql", load_inplace=True))
    assert llm.executor.adapters == set()  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="no LoRA adapter has the name"):
        llm.remove_lora("sql")


def test_a_fork_is_refused_where_the_adapter_of_its_source_was_replaced(llm: LLM) -> None:
    ended = llm.start("a", SAMPLING, lora_request=SQL)
    output = ended.wait()
    live = llm.start("b", SAMPLING, lora_request=SQL)
    llm.step()
    llm.add_lora(LoRARequest("sql", 1, "/adapters/other", load_inplace=True))
    for source in (ended, output, live):
        with pytest.raises(InvalidRequest, match="'sql' was replaced since"):
            llm.fork(source, 0)
    assert live.wait().outputs[0].text == "sql:<b>"
    llm.add_lora(LoRARequest("sql", 1, "/adapters/sql", load_inplace=True))
    assert llm.fork(ended, 4).wait().adapter == "sql"


def test_an_event_loop_names_adapters_too(make_llm: MakeLLM) -> None:
    offline = make_llm(echo, enable_lora=True)
    offline.close()
    llm = AsyncLLM(device="cpu", enable_lora=True)

    async def answer(prompt: str, lora: LoRARequest | None) -> str:
        async for output in llm.generate(prompt, SAMPLING, lora_request=lora):
            last = output
        return last.outputs[0].text

    async def run() -> list[str]:
        first = await answer("a", SQL)
        found = [first, *await asyncio.gather(answer("b", SQL), answer("c", None), answer("d", LoRARequest("sql")))]
        with pytest.raises(InvalidRequest, match="bad is no adapter"):
            await answer("a", LoRARequest("bad", 3, "/adapters/bad"))
        assert [info.name for info in await llm.list_loras()] == ["sql"]
        assert await llm.remove_lora("sql")
        return found

    try:
        assert asyncio.run(run()) == ["sql:<a>", "sql:<b>", "<c>", "sql:<d>"]
    finally:
        llm.shutdown()


@pytest.fixture
def reading(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, list[str], threading.Event]:
    """An LLM whose models have the same executor, the folders that it has begun to read, and what lets it go on."""
    offline = make_llm(echo, enable_lora=True)
    offline.close()
    begun, goes_on, read = list[str](), threading.Event(), offline.executor.read_adapter  # type: ignore[attr-defined]

    def read_adapter(name: str, folder: str) -> AdapterInfo:
        begun.append(folder)
        assert goes_on.wait(60)
        found: AdapterInfo = read(name, folder)
        return found

    monkeypatch.setattr(offline.executor, "read_adapter", read_adapter)  # type: ignore[attr-defined]
    return offline, begun, goes_on


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_requests_that_name_a_new_adapter_at_once_load_it_once(reading: tuple[LLM, list[str], threading.Event]) -> None:
    _, begun, goes_on = reading
    llm = AsyncLLM(device="cpu", enable_lora=True)
    bad = LoRARequest("bad", 3, "/adapters/bad")

    async def run() -> None:
        loads = [asyncio.create_task(llm.add_lora(each)) for each in (SQL, SQL, LoRARequest("sql"), SQL, bad, bad)]
        other = asyncio.create_task(llm.add_lora(LoRARequest("sql", 1, "/adapters/other")))
        await until(lambda: len(begun) == 2)
        await llm.list_loras()  # all of them have asked
        goes_on.set()
        results = await asyncio.gather(*loads, return_exceptions=True)
        assert results[:4] == [True] * 4
        assert all("bad is no adapter" in str(each) for each in results[4:])
        with pytest.raises(InvalidRequest, match="is loaded from '/adapters/sql'"):
            await other
        assert sorted(begun) == ["/adapters/bad", "/adapters/sql"]
        assert [info.name for info in await llm.list_loras()] == ["sql"]

    try:
        asyncio.run(run())
    finally:
        llm.shutdown()


def test_an_adapter_is_loaded_though_the_request_for_it_was_cancelled(
    reading: tuple[LLM, list[str], threading.Event],
) -> None:
    offline, begun, goes_on = reading
    llm = AsyncLLM(device="cpu", enable_lora=True)

    async def run() -> None:
        first = asyncio.create_task(llm.add_lora(SQL))
        await until(lambda: begun)
        second = asyncio.create_task(llm.add_lora(SQL))
        await llm.list_loras()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await llm.list_loras() == ()
        goes_on.set()
        assert await second
        assert [info.name for info in await llm.list_loras()] == ["sql"]
        assert await llm.remove_lora("sql")
        assert offline.executor.adapters == set()  # type: ignore[attr-defined]
        assert await llm.add_lora(SQL)

    try:
        asyncio.run(run())
    finally:
        llm.shutdown()


# ------------------------------------------------------------------------------------------------------------ folders
@pytest.fixture
def root(tmp_path: Path) -> Path:
    outside, folder = tmp_path / "outside", tmp_path / "adapters"
    for each in (outside, folder / "sql", folder / "team" / "chat", tmp_path / "adapters-too"):
        each.mkdir(parents=True)
        (each / "adapter_config.json").write_text("{}")
    (folder / "link").symlink_to("sql")
    (folder / "out").symlink_to(outside)
    (folder / "team" / "up").symlink_to("..")
    (folder / "file").write_text("")
    (folder / "linked").mkdir()
    (folder / "linked" / "adapter_model.safetensors").symlink_to("/etc/passwd")
    (folder / "piped").mkdir()
    os.mkfifo(folder / "piped" / "adapter_config.json")
    return folder


def test_a_folder_below_the_operators_is_found(root: Path) -> None:
    for path in ("sql", "./sql/", "team/chat", "team//chat", str(root / "sql"), str(root / "team" / "chat")):
        assert folder_below(str(root), path) in (str(root / "sql"), str(root / "team" / "chat"))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "is not the path"),
        ("a\0b", "is not the path"),
        ("x" * 5_000, "is not the path"),
        ("sql\ud800", "is not the path"),
        (".", "is outside"),
        ("/", "is outside"),
        ("..", "is outside"),
        ("../outside", "is outside"),
        ("sql/../../outside", "is outside"),
        ("sql/..", "is outside"),
        ("/etc", "is outside"),
        ("ROOT", "is outside"),
        ("ROOT/../outside", "is outside"),
        ("ROOT-too", "is outside"),
        ("link", "is a link"),
        ("out", "is a link"),
        ("team/up/sql", "is a link"),
        ("file", "cannot be opened as a folder"),
        ("missing", "cannot be opened as a folder"),
        ("linked", "a link"),
        ("piped", "a special file"),
    ],
)
def test_every_other_path_is_refused(root: Path, path: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        folder_below(str(root), path.replace("ROOT", str(root)))
    assert refusal.value.field == "lora_path"
    targets = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert not [target for target in targets if target.startswith(os.path.realpath(root.parent))]


def test_a_folder_of_the_operator_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the operator's lora_dir cannot be opened: No such file") as refusal:
        folder_below(str(tmp_path / "gone"), "sql")
    assert refusal.value.field == "lora_path"
    assert refusal.value.fix


@pytest.mark.parametrize("char", ["\n", "\x00", "\x1b", "\x7f", "\x85", "\x9f", "\u2028", "\u2029", "\udc80"])
def test_names_have_no_line_breaks_and_control_characters(llm: LLM, char: str) -> None:
    with pytest.raises(InvalidRequest, match="is no name of an adapter") as refusal:
        llm.add_lora(LoRARequest(f"a{char}b", 1, "/adapters/sql"))
    assert refusal.value.field == "lora_name"


@pytest.mark.parametrize("name", ["", " a", "a\u00a0", "x" * 257])
def test_names_are_short_and_have_no_outer_spaces(llm: LLM, name: str) -> None:
    with pytest.raises(InvalidRequest, match="is no name of an adapter"):
        llm.add_lora(LoRARequest(name, 1, "/adapters/sql"))
    assert llm.add_lora(LoRARequest("ü b" + "x" * 253, 1, "/adapters/sql"))
