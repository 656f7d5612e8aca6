"""With a model: one batch of every way to decode gives each request the tokens it gets alone."""

from __future__ import annotations

from typing import Any

import pytest

from harness import VOCABULARY
from quire.engine.core import EngineCore
from quire.engine.decoding.tools import DecodingTools
from quire.kernels.native.loader import set_threads
from quire.types.decoding import BeamRules
from quire.types.output import Finished
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules
from tiny_models import VOCAB, random_checkpoint, tiny_config
from toy_decoding import ToyGrammars
from worker_executor import TinyEngine

TARGET = random_checkpoint(tiny_config())
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
LENGTH, END_IDS = 14, (3, 5)
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "top_k": 40, "seed": 2},
    "penalised": {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 5},
    "four": {"n": 4, "temperature": 1.0, "seed": 4},
    "best": {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 5},
    "beam 4": {"beam": BeamRules(4), "n": 4},
    "beam 7": {"beam": BeamRules(7, 0.5, "never"), "n": 7, "repetition_penalty": 1.3},
    "beams with a grammar": {"beam": BeamRules(3), "n": 3, "grammar": "jj"},
    "grammar": {"grammar": "json", "temperature": 1.0, "seed": 6},
    "tool call": {"grammar": "tool", "temperature": 0.0, "n": 2},
    "stopped": {"n": 1, "best_of": 3, "temperature": 1.0, "seed": 7, "stop": "e"},
}


def request(name: str) -> Submit:
    params = dict(ASKED[name])
    beam, rules = params.pop("beam", None), TokenRules(END_IDS, (), (3,), params.pop("grammar", ""))
    words = [ord(letter) % VOCAB for letter in name]
    sampling = SamplingParams(**{"max_tokens": LENGTH, **params})
    return Submit(name, (*words, *words[: len(words) // 2 + 1]), sampling, rules, beam=beam)


def core_of(speculation: dict[str, Any] | None, depth: int, **settings: Any) -> EngineCore:
    made = TinyEngine(TARGET, speculation, depth=depth, **settings)
    tools = DecodingTools(ToyGrammars(), made.proposers, lambda: VOCABULARY)
    return EngineCore(made.executor, made.config.cache, made.config.scheduler, VOCAB, tools=tools)


def run(core: EngineCore, requests: list[Submit]) -> dict[str, list[tuple[int, ...]]]:
    finished: dict[str, Finished] = {}
    for each in requests:
        core.submit(each)
    while core.has_work:
        finished |= {message.request_id: message for message in core.step().finished}
        core.check()
    assert {message.error for message in finished.values()} == {None}
    return {name: [sample.token_ids for sample in message.samples] for name, message in finished.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[tuple[int, ...]]]:
    set_threads(1)
    found = {}
    for name in ASKED:
        found |= run(core_of(None, 1, block_size=16, num_blocks=64, rows=8), [request(name)])
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("speculation", [None, NGRAM], ids=["plain", "guessed"])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 800), (4, 60), (16, 64)])
def test_a_mixed_batch_gives_each_request_the_tokens_it_gets_alone(
    alone: dict[str, list[tuple[int, ...]]],
    depth: int,
    speculation: dict[str, Any] | None,
    block_size: int,
    num_blocks: int,
) -> None:
    core = core_of(speculation, depth, block_size=block_size, num_blocks=num_blocks, rows=40)
    assert run(core, [request(name) for name in ASKED]) == alone
    assert (core.stats().preemptions > 0) == (num_blocks == 60)


@pytest.mark.parametrize(("tensor", "speculation"), [(2, NGRAM), (3, None)])
def test_ranks_that_share_the_model_give_each_request_the_tokens_of_one(
    alone: dict[str, list[tuple[int, ...]]], tensor: int, speculation: dict[str, Any] | None
) -> None:
    core = core_of(speculation, 2, block_size=4, num_blocks=60, rows=40, tensor=tensor)
    assert run(core, [request(name) for name in ASKED]) == alone
    assert core.stats().preemptions > 0
