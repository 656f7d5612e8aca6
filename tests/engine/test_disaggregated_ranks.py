"""Prefill and decode in two engines of several ranks: every rank of the decode engine gets the bytes of its part of a
block from the same rank of the prefill engine. Ranks are processes, so this is the real shared memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.serving.server import free_port
from cache_dump_rank import FOLDER, dump_path
from disaggregated import BLOCK, LENGTHS, ONE, both, cached_blocks, core_of, open_llm, prompts_of, tokens
from family_models import FamilyCase
from quire import LLM
from quire.runtime.executor.links import ProcessLauncher
from quire.runtime.transport import shared_memory

pytest.importorskip("transformers")
WHOLE = "QUIRE_TEST_WHOLE" in os.environ
NAME = f"pd-{os.getpid()}"
TENSOR, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FamilyCase]:
    names = ("llama", "gemma3_text", "deepseek_v3")
    made = {name: FamilyCase(name, tmp_path_factory.mktemp(name)) for name in names}
    assert all(case.model is not None for case in made.values())  # they are written
    return made


@pytest.fixture(autouse=True)
def dumps(tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to which the ranks of all engines write their KV caches. They wait for blocks, too."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(ProcessLauncher.__init__, "__defaults__", ("cache_dump_rank",))
    return tmp_path


def url_of(scheme: str, ranks: dict[str, int]) -> str:
    return f"shm://{NAME}" if scheme == "shm" else f"tcp://127.0.0.1:{free_ports(count_ranks(ranks))}"


def count_ranks(ranks: dict[str, int]) -> int:
    return ranks.get("tensor_parallel_size", 1) * ranks.get("pipeline_parallel_size", 1)


def folders() -> list[Path]:
    """The shared memory of this test's engines."""
    found = Path("/dev/shm").glob(f"quire-kv-{os.geteuid()}-{NAME}*")
    return sorted(path for path in found if path.is_dir())


def free_ports(count: int) -> int:
    """The first of so many consecutive ports that nobody listens at."""
    for _ in range(100):
        first = free_port()
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def bytes_of_ranks(llm: LLM, role: str, num_ranks: int, prompt: list[int], folder: Path) -> list[np.ndarray[Any, Any]]:
    """By rank: the cached blocks of a prompt, from the memory of the rank's process."""
    core_of(llm).executor.check()  # ranks write their caches
    blocks = cached_blocks(llm, prompt)
    return [np.load(dump_path(folder, role, rank))[:, blocks] for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("family", "scheme", "ranks", "settings"),
    [
        ("llama", "shm", TENSOR, {}),
        ("llama", "tcp", TENSOR, {"kv_cache_dtype": "int8"}),  # blocks with scales
        ("llama", "shm", STAGES, {}),  # of two layers and of one
        ("llama", "tcp", STAGES, {}),
        ("deepseek_v3", "shm", TENSOR, {}),  # every rank has the whole latents
        pytest.param("llama", "tcp", TENSOR | STAGES, {}, marks=pytest.mark.skipif(not WHOLE, reason="long")),
    ],
)
def test_the_bytes_of_every_rank_are_equal_in_both_engines_and_tokens_are_those_of_one_process(
    cases: dict[str, FamilyCase],
    family: str,
    scheme: str,
    ranks: dict[str, int],
    settings: dict[str, Any],
    dumps: Path,
) -> None:
    case, num_ranks = cases[family], count_ranks(ranks)
    prompt = case.prompt(61, 1)
    with open_llm(case, **settings) as llm:
        expected = tokens(llm, [prompt])
    with both(case, url_of(scheme, ranks), **ranks, **settings) as (prefill, decode):
        assert tokens(prefill, [prompt], ONE) == [expected[0][:1]]
        assert tokens(decode, [prompt]) == expected
        stats = decode.stats()
        assert (stats.remote_hits, stats.prompt_tokens, stats.tiers.failures) == (60, 1, {})
        if scheme == "shm":
            held = [sorted(path.name for path in folder.iterdir()) for folder in folders()]
            assert len(held) == num_ranks
            assert all(names == held[0] != [] for names in held)
        ours = bytes_of_ranks(prefill, "prefill", num_ranks, prompt, dumps)
        theirs = bytes_of_ranks(decode, "decode", num_ranks, prompt, dumps)
    for mine, same in zip(ours, theirs, strict=True):
        assert mine.shape[1] == 15
        assert mine.any(axis=(0, 2)).all()
        assert np.array_equal(mine, same)
    if family != "deepseek_v3":
        assert len({part.tobytes() for part in ours}) == num_ranks  # no rank has the part of another one
    assert not folders()


def test_stages_with_windows_carry_prompts_of_several_lengths(cases: dict[str, FamilyCase]) -> None:
    case = cases["gemma3_text"]
    prompts = prompts_of(case)
    with open_llm(case) as llm:
        expected = tokens(llm, prompts)
    with both(case, url_of("tcp", STAGES), **STAGES) as (prefill, decode):
        tokens(prefill, prompts, ONE)
        assert tokens(decode, prompts) == expected
        stats = decode.stats()
        assert stats.remote_hits == sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
        assert stats.tiers.failures == {}
        core_of(decode).check()
        core_of(prefill).check()


def test_an_engine_of_another_number_of_ranks_finds_no_part(cases: dict[str, FamilyCase]) -> None:
    case, prompt = cases["llama"], cases["llama"].prompt(40, 1)
    assert Path("/dev/shm") == shared_memory.ROOT
    with open_llm(case, "prefill", f"shm://{NAME}", **TENSOR) as prefill:
        (first,) = tokens(prefill, [prompt], ONE)
        with open_llm(case, "decode", f"shm://{NAME}") as decode:
            assert tokens(decode, [prompt])[0][:1] == first
            assert (decode.stats().remote_hits, decode.stats().tiers.failures) == (0, {})
