"""Random combinations of the engine's features over one model, and a crowd of random requests for each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from adapter_files import SMALL, make_adapter
from family_models import VOCAB, FamilyCase
from quire.config.model import ModelConfig
from quire.config.tiers import TierConfig
from quire.engine.speculation.draft_length import DraftLength
from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.output import Finished
from quire.types.request import Abort, Submit
from quire.types.sampling import SamplingParams, TokenRules
from tiny_models import MemoryCheckpoint, random_checkpoint, tiny_config
from worker_executor import TinyEngine

LONGEST = 80  # tokens of any sequence
MAX_STEPS = 5_000
FIRST = 3  # token ids from here on have no special meaning
ADAPTER = "adapter"
LOGPROB_ERROR = 1e-4


@dataclass
class Combination:
    """Settings of one engine. `numeric` settings change the answers; all others must not."""

    seed: int
    numeric: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] | None = None
    has_adapter: bool = False

    @property
    def is_staged(self) -> bool:
        return "stages" in self.others


@dataclass(frozen=True)
class Asked:
    """One request of the crowd."""

    name: str
    prompt: list[int]
    sampling: dict[str, Any]
    beam: int = 0
    end_ids: tuple[int, ...] = ()
    adapter: str = ""

    def submit(self) -> Submit:
        return Submit(
            self.name,
            tuple(self.prompt),
            SamplingParams(**{"temperature": 0.0, **self.sampling}),
            TokenRules(end_ids=self.end_ids),
            beam=BeamRules(self.beam) if self.beam else None,
            adapter=self.adapter,
        )


def random_combination(seed: int, model: ModelConfig) -> Combination:
    """Choose settings that this model can run with."""
    rng, made = random.Random(seed), Combination(seed)
    made.numeric["attention"] = rng.choice(["native", "native", "auto"])
    if rng.random() < 0.3:
        made.numeric["kv_dtype"] = rng.choice(["float8", "int8", "int4"]) if model.latent is None else "float8"
        made.numeric["attention"] = "auto"
    if rng.random() < 0.25:
        made.numeric["quantization"] = rng.choice(["fp8", "int8", "int4"])
    kind = rng.random()
    is_plain = model.recurrent is None and model.vision is None
    if kind < 0.2:
        made.numeric["tensor"] = 2
    elif kind < 0.35 and is_plain:
        made.others["stages"] = 2
    block_size = rng.choice([1, 2, 3, 4, 5, 8, 16])
    if model.has_chunks:  # these are whole blocks
        block_size = gcd(block_size, *(size for size in model.windows if size is not None))
    few = -(-LONGEST // block_size)  # blocks of the longest sequence
    rows = rng.choice([4, 5, 8])
    made.others |= {
        "block_size": block_size,
        "num_blocks": few + rng.choice([2, 2, few // 2, 8 * few]),
        "rows": rows,
        "budget": max(rows, rng.choice([5, 7, 16, 33, 64, 512])),
        "depth": rng.randint(1, 3),
    }
    if rng.random() < 0.4:
        made.others["tiers"] = TierConfig(host_blocks=rng.choice([8, 64, 400]))
    made.speculation = None if made.is_staged else _random_speculation(rng, is_recurrent=model.recurrent is not None)
    made.has_adapter = "quantization" not in made.numeric and model.vision is None and rng.random() < 0.3
    return made


def _random_speculation(rng: random.Random, *, is_recurrent: bool) -> dict[str, Any] | None:
    kind, tokens = rng.random(), {"num_speculative_tokens": rng.randint(1, 5)}
    if kind < 0.2:
        return {"method": "ngram", "prompt_lookup_min": 1, **tokens}
    if kind < 0.35 and not is_recurrent:
        return {"method": "self_draft", "num_layers": rng.randint(1, 2), **tokens}
    return {"method": "draft_model", "model": "small", **tokens} if kind < 0.45 else None


def random_requests(combination: Combination) -> Iterator[Asked]:
    """Make requests with prompts of a common stem or of repeated tokens, every way of sampling, and beams."""
    rng = random.Random(combination.seed + 1)
    stem = rng.choices(range(FIRST, VOCAB), k=30)
    for number in range(rng.randint(4, 12)):
        prompt = stem[: rng.randint(0, 30)] + rng.choices(range(FIRST, VOCAB), k=rng.randint(1, 25))
        prompt = prompt[:8] * 3 if rng.random() < 0.25 else prompt
        beam = rng.choice([2, 3]) if rng.random() < 0.12 else 0
        sampling = {"max_tokens": rng.randint(2, 10), "n": beam} if beam else _random_sampling(rng)
        if rng.random() < 0.4:  # a short prompt and a long answer: sequences that grow are preempted
            prompt, sampling = prompt[-6:], sampling | {"max_tokens": 45}
        end_ids = tuple(rng.choices(range(FIRST, VOCAB), k=2)) if rng.random() < 0.4 else ()
        adapter = ADAPTER if combination.has_adapter and rng.random() < 0.5 else ""
        yield Asked(f"r{number}", prompt, sampling, beam, end_ids, adapter)


def _random_sampling(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(1, 20)
    chosen: dict[str, Any] = {"max_tokens": count, "logprobs": rng.randint(0, 4)}
    if rng.random() < 0.15:
        chosen["prompt_logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.4:
        return chosen
    chosen |= {"temperature": rng.choice([0.5, 0.9, 1.3]), "seed": rng.randrange(1000)}
    chosen |= rng.choice([{}, {"n": rng.randint(2, 4)}, {"n": 2, "best_of": 3}])
    possible = {
        "top_k": rng.randint(1, 30), "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.7,
        "logit_bias": {rng.randrange(VOCAB): 3.0}, "min_tokens": rng.randint(0, count), "logprob_token_ids": [3, 50],
    }  # fmt: skip
    return chosen | {name: value for name, value in possible.items() if rng.random() < 0.2}


class CombinationRun:
    """Runs a crowd through an engine with all settings of a combination, and each request alone through a plain one."""

    def __init__(self, case: FamilyCase, combination: Combination, folder: Path) -> None:
        self._combination, self._rng = combination, random.Random(combination.seed + 2)
        self.met: Counter[str] = Counter()
        numeric, others, speculation = combination.numeric, combination.others, combination.speculation
        more: dict[str, Any] = {"adapters": SMALL} if combination.has_adapter else {}
        draft = _draft_model() if speculation is not None and speculation["method"] == "draft_model" else None
        checkpoint: Any = case.checkpoint()
        self.crowded = TinyEngine(checkpoint, speculation, draft=draft, **numeric, **others, **more)
        if speculation is not None:  # drafts are made whether they pay or not
            lengths: Any = self.crowded.proposers.lengths  # type: ignore[attr-defined]
            lengths.length = lambda *given, **_: DraftLength(given[1])
        self.alone = TinyEngine(checkpoint, **numeric, **more, block_size=16, num_blocks=200, rows=8)
        if combination.has_adapter:
            make_adapter(folder / ADAPTER, case.model, only=lambda name: "experts" not in name and "router" not in name)
            for engine in (self.crowded, self.alone):
                engine.core.adapters.load(ADAPTER, str(folder / ADAPTER))

    def run(self) -> None:
        """Raises an AssertionError at the first answer that is not the one its request gets alone."""
        asked, aborted = self._run_crowd()
        stats = self.crowded.core.stats()
        self.met.update({"preempted": stats.preemptions, "drafted": stats.drafted_tokens})
        for each in asked:
            if each.name not in aborted:
                self._compare(each)
        for engine in (self.crowded, self.alone):
            engine.executor.close()

    def _run_crowd(self) -> tuple[list[Asked], set[str]]:
        """Submit all requests at random steps, next turns of ended ones too, and abort some."""
        rng, engine = self._rng, self.crowded
        waiting: list[Asked] = list(random_requests(self._combination))
        asked: list[Asked] = []
        aborted: set[str] = set()
        for _ in range(MAX_STEPS):
            if not waiting and not engine.core.has_work:
                return asked, aborted
            while waiting and (rng.random() < 0.4 or not engine.core.has_work):
                self._submit(waiting.pop(0), asked)
            if not engine.core.has_work:
                continue
            out = engine.core.step()
            engine.core.check()
            engine.finished |= {message.request_id: message for message in out.finished}
            ended = {message.request_id: message for message in out.finished if message.error is None}
            waiting += [turn for each in asked if (turn := self._next_turn(each, ended.get(each.name)))]
            live = [each.name for each in asked if each.name not in engine.finished and each.name not in aborted]
            if live and rng.random() < 0.02:
                name = rng.choice(live)
                aborted.add(name)
                engine.core.abort(Abort(name))
            if rng.random() < 0.01:
                engine.core.reset_cache()
        raise AssertionError(f"requests still run after {MAX_STEPS} steps")

    def _submit(self, request: Asked, asked: list[Asked]) -> None:
        """Submit a request, and append it to `asked` unless the cache is too small for it."""
        try:
            self.crowded.core.submit(request.submit())
        except InvalidRequest as error:
            if error.field != "max_tokens":
                raise
            self.met["too large"] += 1
        else:
            asked.append(request)

    def _next_turn(self, asked: Asked, ended: Finished | None) -> Asked | None:
        rng = self._rng
        if ended is None or asked.beam or rng.random() > 0.3:
            return None
        prompt = [*asked.prompt, *ended.samples[0].token_ids, *rng.choices(range(FIRST, VOCAB), k=3)]
        return replace(asked, name=f"{asked.name}+", prompt=prompt) if len(prompt) < LONGEST - 25 else None

    def _compare(self, asked: Asked) -> None:
        self.alone.core.reset_cache()
        self.alone.core.submit(asked.submit())
        self.alone.run(check=False)
        found, expected = self.crowded.finished[asked.name], self.alone.finished[asked.name]
        assert found.error is None, f"{asked}: {found.error}"
        assert expected.error is None, f"{asked} alone: {expected.error}"
        tokens = [list(sample.token_ids) for sample in found.samples]
        wanted = [list(sample.token_ids) for sample in expected.samples]
        assert tokens == wanted, f"{asked}: {tokens}, alone {wanted}"
        np.testing.assert_allclose(_logprobs(found), _logprobs(expected), atol=LOGPROB_ERROR, err_msg=str(asked))
        self.met["compared"] += 1
        self.met["adapted"] += bool(asked.adapter)
        self.met["beams"] += bool(asked.beam)
        self.met["cached"] += found.num_cached_tokens > 0


def _draft_model() -> MemoryCheckpoint:
    return random_checkpoint(tiny_config(num_layers=1, vocab_size=VOCAB))


def _logprobs(finished: Finished) -> list[float]:
    """All logprobs of an answer: of its samples, and of its prompt."""
    sums = [sample.cumulative_logprob for sample in finished.samples if sample.cumulative_logprob is not None]
    table = finished.prompt_logprobs
    return sums + ([] if table is None else np.asarray(table.logprobs, dtype=np.float64).ravel().tolist())
