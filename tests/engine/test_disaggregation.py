"""Prefill and decode in two engines: a KV transport carries the blocks of a prompt. The tokens are those of one engine,
byte for byte the same keys and values are read, and whatever the transport loses is computed again."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.serving.server import free_port
from disaggregated import BLOCK, LENGTHS, MANY, ONE, both, cached_blocks, core_of, open_llm, prompts_of, tokens
from family_models import FamilyCase
from quire import LLM
from quire.runtime.tiers import remote_store
from quire.runtime.transport import shared_memory

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FamilyCase]:
    names = ("llama", "gemma3_text", "mistral", "qwen3_next")
    made = {name: FamilyCase(name, tmp_path_factory.mktemp(name)) for name in names}
    assert all(case.model is not None for case in made.values())  # they are written
    return made


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory in a folder of its own."""
    monkeypatch.setattr(shared_memory, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _patient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are the threads that carry blocks."""
    monkeypatch.setattr(remote_store, "CALL_SECONDS", 120.0)
    monkeypatch.setattr(remote_store, "LOOKUP_SECONDS", 120.0)


def bytes_of(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """The cached blocks of a prompt, from the memory of the device."""
    worker = core_of(llm).executor._worker  # type: ignore[attr-defined]
    return worker.cache.blocks[:, cached_blocks(llm, prompt)].view(torch.uint8).clone()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"kv_cache_dtype": "int8"}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("llama", {"max_num_batched_tokens": 16}),  # prompts in several chunks
        ("gemma3_text", {}),  # layers with a window
        ("gemma3_text", {"max_num_batched_tokens": 16}),
        ("mistral", {}),  # no other layers
        ("mistral", {"max_num_batched_tokens": 16}),
        ("qwen3_next", {}),  # recurrent layers
    ],
)
def test_tokens_are_those_of_one_engine_and_only_the_end_of_a_prompt_is_computed_again(
    cases: dict[str, FamilyCase], family: str, settings: dict[str, Any], root: Path
) -> None:
    case = cases[family]
    prompts = prompts_of(case)
    with open_llm(case, **settings) as llm:
        expected = tokens(llm, prompts)
    with both(case, **settings) as (prefill, decode):
        assert tokens(prefill, prompts, ONE) == [answer[:1] for answer in expected]
        assert tokens(decode, prompts) == expected
        stats, reusable = decode.stats(), sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
        assert stats.remote_hits == reusable
        assert stats.prompt_tokens == sum(LENGTHS) - reusable
        assert stats.tiers.failures == {}
        core_of(decode).check()
        core_of(prefill).check()
    assert list(root.iterdir()) == []  # the last engine removed everything


def test_the_bytes_of_keys_and_values_are_equal_in_both_engines(cases: dict[str, FamilyCase]) -> None:
    case = cases["llama"]
    prompt = case.prompt(61, 1)
    with both(case) as (prefill, decode):
        tokens(prefill, [prompt], ONE)
        tokens(decode, [prompt])
        ours, theirs = bytes_of(prefill, prompt), bytes_of(decode, prompt)
        assert decode.stats().remote_hits == 60
    assert ours.shape[1] == 15
    assert ours.any()
    assert torch.equal(ours, theirs)


def test_over_tcp_too(cases: dict[str, FamilyCase]) -> None:
    case = cases["gemma3_text"]
    prompts = prompts_of(case)
    with open_llm(case) as llm:
        expected = tokens(llm, prompts)
    with both(case, f"tcp://127.0.0.1:{free_port()}") as (prefill, decode):
        tokens(prefill, prompts, ONE)
        assert tokens(decode, prompts) == expected
        assert decode.stats().remote_hits == sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)


def test_engines_of_role_both_share_what_either_computes(cases: dict[str, FamilyCase]) -> None:
    case = cases["llama"]
    first, second = case.prompt(40, 1), case.prompt(40, 2)
    with open_llm(case, "both") as one, open_llm(case, "both") as other:
        expected = [tokens(one, [first]), tokens(other, [second])]
        assert [tokens(other, [first]), tokens(one, [second])] == expected
        assert [llm.stats().remote_hits for llm in (one, other)] == [36, 36]


def test_a_salt_separates_blocks_in_the_transport(cases: dict[str, FamilyCase]) -> None:
    case = cases["llama"]
    prompt = case.prompt(40, 1)
    with both(case) as (prefill, decode):
        prefill.generate([{"prompt_token_ids": prompt, "cache_salt": "a"}], ONE, use_tqdm=False)
        tokens(decode, [prompt])
        assert decode.stats().remote_hits == 0
        decode.generate([{"prompt_token_ids": prompt, "cache_salt": "a"}], MANY, use_tqdm=False)
        assert decode.stats().remote_hits == 36


def test_a_lora_adapter_is_part_of_the_key(
    cases: dict[str, FamilyCase], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from adapter_files import make_adapter
    from quire import LoRARequest

    case = cases["llama"]
    folder = make_adapter(tmp_path_factory.mktemp("adapter"), case.model)
    adapter, lora = LoRARequest("a", 1, str(folder)), {"enable_lora": True, "max_lora_rank": 8}
    prompt = case.prompt(61, 1)
    with open_llm(case, **lora) as llm:
        plain, adapted = tokens(llm, [prompt]), tokens(llm, [prompt], lora_request=adapter)
    assert plain != adapted
    with both(case, **lora) as (prefill, decode):
        tokens(prefill, [prompt], ONE, lora_request=adapter)
        assert tokens(decode, [prompt]) == plain
        assert decode.stats().remote_hits == 0
        assert tokens(decode, [prompt], lora_request=adapter) == adapted
        assert decode.stats().remote_hits == 60


def test_another_model_finds_nothing(cases: dict[str, FamilyCase]) -> None:
    prompt = cases["llama"].prompt(40, 1)
    with open_llm(cases["llama"], "prefill") as prefill, open_llm(cases["llama"], "decode", dtype="bfloat16") as decode:
        tokens(prefill, [prompt], ONE)
        tokens(decode, [prompt])
        assert decode.stats().remote_hits == 0


# ----------------------------------------------------------------------------------------------------------- faults
def test_damaged_blocks_are_dropped_counted_and_computed_again(cases: dict[str, FamilyCase], root: Path) -> None:
    case = cases["llama"]
    prompt = case.prompt(61, 1)
    with open_llm(case) as llm:
        expected = tokens(llm, [prompt])
    with both(case) as (prefill, decode):
        tokens(prefill, [prompt], ONE)
        files = sorted(path for path in next(path for path in root.iterdir() if path.is_dir()).iterdir())
        assert len(files) == 15
        for number, path in enumerate(files):
            data = bytearray(path.read_bytes())
            data[[-1, 20, 50][number % 3]] ^= 1  # in the block, in the key, in the layout
            path.write_bytes(data[: -7 if number == 9 else None])
        assert tokens(decode, [prompt]) == expected
        assert decode.stats().remote_hits == 0
        assert decode.stats().tiers.failures == {"transport_corrupt": 15}
        assert not any(path.exists() for path in files)
        core_of(decode).check()


def test_a_store_that_is_too_small_costs_time_and_nothing_else(cases: dict[str, FamilyCase], root: Path) -> None:
    case = cases["llama"]
    prompts = prompts_of(case)
    with open_llm(case) as llm:
        expected = tokens(llm, prompts)
    with both(case, kv_transport_memory="20KiB") as (prefill, decode):
        tokens(prefill, prompts, ONE)
        held = [path.stat().st_size for path in next(path for path in root.iterdir() if path.is_dir()).iterdir()]
        assert 0 < sum(held) <= 20 * 1024
        assert tokens(decode, prompts) == expected
        core_of(decode).check()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_blocks_that_the_transport_has_evicted_are_sent_again_with_the_next_prompt_that_has_them(
    cases: dict[str, FamilyCase], family: str, root: Path
) -> None:
    case = cases[family]
    prompt = case.prompt(61, 1)
    with open_llm(case) as llm:
        (expected,) = tokens(llm, [prompt])
    with both(case) as (prefill, decode):
        tokens(prefill, [prompt], ONE)
        for path in root.glob("quire-kv-*/*"):
            path.unlink()
        tokens(prefill, [prompt], ONE)  # all of it is cached there
        assert tokens(decode, [prompt]) == [expected]
        assert decode.stats().remote_hits == 60
        before = prefill.stats().tiers.put
        tokens(prefill, [prompt], ONE)
        assert prefill.stats().tiers.put == before  # what is there is not sent twice
        core_of(prefill).check()
        core_of(decode).check()


def test_a_tcp_store_that_evicted_a_prompt_gets_it_again(cases: dict[str, FamilyCase]) -> None:
    case = cases["llama"]
    first, other = case.prompt(61, 1), case.prompt(61, 2)
    url = f"tcp://127.0.0.1:{free_port()}"
    with open_llm(case, "prefill", url) as prefill, open_llm(case, "decode", url) as decode:
        store = core_of(prefill).executor._worker.tiers._remote._transport  # type: ignore[attr-defined]
        store._most = 20  # blocks: one prompt and a part of another
        for prompt in (first, other, first):
            tokens(prefill, [prompt], ONE)
        tokens(decode, [first])
        assert decode.stats().remote_hits == 60


def test_a_prefill_engine_that_ends_in_the_middle_costs_time_and_nothing_else(cases: dict[str, FamilyCase]) -> None:
    case = cases["llama"]
    prompts = prompts_of(case)
    with open_llm(case) as llm:
        expected = tokens(llm, prompts)
    url = f"tcp://127.0.0.1:{free_port()}"
    with open_llm(case, "decode", url) as decode:
        with open_llm(case, "prefill", url) as prefill:
            tokens(prefill, prompts, ONE)
            assert tokens(decode, prompts[:1]) == expected[:1]
        assert decode.stats().remote_hits == 60
        assert tokens(decode, prompts) == expected
        assert decode.stats().remote_hits == 60
        assert decode.stats().tiers.failures["transport_io"] > 0
        core_of(decode).check()


def test_a_peer_that_never_answers_is_given_up_at_a_deadline(
    cases: dict[str, FamilyCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "LOOKUP_SECONDS", 0.5)
    case = cases["llama"]
    prompt = case.prompt(61, 1)
    with open_llm(case) as llm:
        expected = tokens(llm, [prompt])
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, open_llm(case, "decode", f"tcp://127.0.0.1:{silent.getsockname()[1]}") as decode:
        assert tokens(decode, [prompt]) == expected
        assert decode.stats().tiers.failures == {"transport_timeout": 1}
        core_of(decode).check()


def test_a_transport_that_takes_no_block_does_not_hold_requests_back(
    cases: dict[str, FamilyCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.engine import handover

    monkeypatch.setattr(handover, "HANDOVER_SECONDS", 0.2)
    never = threading.Event()
    monkeypatch.setattr(shared_memory.SharedMemoryTransport, "put", lambda *_: never.wait(20))
    with open_llm(cases["llama"], "prefill") as prefill:
        assert len(tokens(prefill, [cases["llama"].prompt(40, 1)], ONE)[0]) == 1
        assert prefill.stats().tiers.put == 0
        never.set()


def test_shared_memory_is_private(cases: dict[str, FamilyCase], root: Path) -> None:
    with open_llm(cases["llama"], "prefill") as prefill:
        tokens(prefill, [cases["llama"].prompt(12)], ONE)
        found = {path.name: path.stat().st_mode & 0o777 for path in root.iterdir()}
        name = f"quire-kv-{os.geteuid()}-pd"
        assert found == {name: 0o700, f"{name}.lock": 0o600}
        assert {path.stat().st_mode & 0o777 for path in (root / name).iterdir()} == {0o600}
