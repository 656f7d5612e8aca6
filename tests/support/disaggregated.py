"""Engines that share KV blocks through a KV transport: one that prefills and one that decodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from family_models import FamilyCase
from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.serving.client import InProcessClient
from quire.types.request import Submit

BLOCK = 4
USUAL: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 4,
    "max_model_len": 256, "kv_cache_memory": "8MiB", "block_size": BLOCK, "host_cache_memory": "2MiB",
}  # fmt: skip
GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
ONE, MANY = SamplingParams(max_tokens=1, **GREEDY), SamplingParams(max_tokens=10, **GREEDY)
LENGTHS = (61, 64, 65, 30, 3)  # within a block, at its end, one token more; less than a block


def open_llm(case: FamilyCase, role: str | None = None, url: str = "shm://pd", **settings: Any) -> LLM:
    kv = {} if role is None else {"kv_role": role, "kv_transport": url, "kv_transport_memory": "16MiB"}
    return LLM(case.directory, **(USUAL | kv | settings))


@contextmanager
def both(case: FamilyCase, url: str = "shm://pd", **settings: Any) -> Iterator[tuple[LLM, LLM]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(open_llm(case, role, url, **settings)) for role in ("prefill", "decode"))  # type: ignore[misc]


def core_of(llm: LLM) -> EngineCore:
    assert isinstance(llm._client, InProcessClient)
    return llm._client._core


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = MANY, **others: Any) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False, **others)]


def prompts_of(case: FamilyCase) -> list[list[int]]:
    return [case.prompt(length, length) for length in LENGTHS]


def cached_blocks(llm: LLM, prompt: list[int]) -> list[int]:
    """The ids of the blocks in which an engine has cached a prompt."""
    tree, packed = core_of(llm)._scheduler.tree, Submit("x", prompt, ONE).key_tokens  # type: ignore[arg-type]
    match = tree.match("", packed, len(prompt) // BLOCK * BLOCK)
    assert match.node is not None
    return tree.path(match.node)[: match.num_blocks]
