"""Random combinations of the engine's features over one model, and a crowd of random requests for each."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapter_files import SMALL, make_adapter
from crowd_requests import ADAPTER, FIRST, LAST, Asked, CrowdKind, random_requests
from family_models import VOCAB, FamilyCase
from fuzz_grammars import FuzzGrammars
from mtp_heads import MtpCase
from promises import LOGPROB_ERROR, keeps_tokens, quantized_error
from quire.config.model import ModelConfig
from quire.config.tiers import EVICTION_NAMES, TierConfig
from quire.config.vision import ImageLimits
from quire.engine.speculation.draft_length import DraftLength
from quire.runtime.loading.checkpoint import Checkpoint, open_checkpoint
from quire.runtime.loading.files import files_at
from quire.types.errors import InvalidRequest
from quire.types.output import Finished
from quire.types.request import Abort
from standby_drill import StandbyDrill
from tiny_models import DEVICE, MemoryCheckpoint, random_checkpoint, tiny_config
from vision_models import vision_model
from worker_executor import TinyEngine

LONGEST = 80  # tokens of any sequence
MAX_STEPS = 5_000
ROW_ENDS = (94, 95)
# The shapes of the images that a family takes here, in tokens.
PICTURES: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4", "gemma4_large"), ((3, 5), (2, 2), (1, 4))),
    "gemma3": ((4, 4),),
    "mistral3": ((3, 5), (2, 2), (4, 1)),
    "smolvlm": ((3, 3),),
}


@dataclass
class VisionCase:
    """A tiny model of a family that takes images."""

    name: str
    directory: Path

    @cached_property
    def model(self) -> torch.nn.Module:
        """Saves it too."""
        return vision_model(self.directory, self.name)

    def checkpoint(self) -> Checkpoint:
        assert self.model is not None  # its files are there
        return open_checkpoint(files_at(self.directory))


Case = FamilyCase | VisionCase


@dataclass
class Combination:
    """Settings of one engine. `numeric` settings change the answers; all others must not."""

    seed: int
    numeric: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] | None = None
    has_adapter: bool = False
    has_grammars: bool = False
    has_disk: bool = False
    standby: float = 0.0  # the chance that a step is followed by a command about the whole engine

    @property
    def keeps_tokens(self) -> bool:
        """Whether an answer of the crowd has the tokens and the logprobs that its request gets alone."""
        return keeps_tokens(self.numeric.get("kv_dtype"), self.numeric.get("quantization"))

    @property
    def is_staged(self) -> bool:
        return "stages" in self.others


def random_combination(seed: int, model: ModelConfig, *, has_head: bool = False) -> Combination:
    """Choose settings that this model can run with. `has_head`: it may draft by an MTP head."""
    rng, made = random.Random(seed), Combination(seed)
    native = "native" if DEVICE == "cpu" else "auto"  # which a GPU has not
    made.numeric["attention"] = rng.choice([native, native, "auto"])
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
        "budget": max(rows, rng.choice([5, 7, 16, 33, 64, 512]), 16 * (model.vision is not None)),
        "depth": rng.randint(1, 3),
        "policy": rng.choice(["fcfs", "fcfs", "priority", "lpm", "spf", "fair"]),
        "eviction": rng.choice(EVICTION_NAMES),
    }
    if rng.random() < 0.4:
        write = rng.choice(["back", "through"])
        made.others["tiers"] = TierConfig(host_blocks=rng.choice([8, 64, 400]), write=write)
        made.has_disk = rng.random() < 0.4
    made.speculation = _random_speculation(rng, model, has_head=has_head)
    if made.is_staged and made.speculation is not None and made.speculation["method"] == "self_draft":
        made.speculation = None
    made.has_adapter = rng.random() < 0.3
    made.has_grammars = rng.random() < 0.35
    made.standby = rng.choice([0.0, 0.0, 0.02, 0.08])
    return made


def _random_speculation(rng: random.Random, model: ModelConfig, *, has_head: bool) -> dict[str, Any] | None:
    kind, tokens = rng.random(), {"num_speculative_tokens": rng.randint(1, 5)}
    if has_head and rng.random() < 0.4:
        return {"method": "mtp", **tokens}
    if kind < 0.2:
        return {"method": "ngram", "prompt_lookup_min": 1, **tokens}
    if kind < 0.35 and model.recurrent is None:
        return {"method": "self_draft", "num_layers": rng.randint(1, 2), **tokens}
    return {"method": "draft_model", "model": "small", **tokens} if kind < 0.45 else None


class CombinationRun:
    """Runs a crowd through an engine with all settings of a combination, and each request alone through a plain one."""

    def __init__(self, case: Case, combination: Combination, folder: Path) -> None:
        self._combination, self._rng = combination, random.Random(combination.seed + 2)
        self.met: Counter[str] = Counter()
        self._differences: list[float] = []  # of logprobs, where tokens may differ
        if combination.speculation is not None and combination.speculation["method"] == "mtp":
            case = _with_head(case, folder)
        checkpoint: Any = case.checkpoint()
        self.kind = self._kind_of(case, checkpoint.config)
        numeric, more = combination.numeric, dict[str, Any](files=files_at(case.directory))
        if combination.has_adapter:
            more["adapters"] = SMALL
        if self.kind.pictures:
            more["images"] = ImageLimits(replace(checkpoint.config.vision.grid, row_ends=self.kind.row_ends))
        self.crowded = self._make_crowded(case, checkpoint, folder, more)
        more["policy"] = combination.others["policy"]  # some give a priority a meaning
        self.alone = TinyEngine(
            checkpoint, **numeric, **more, block_size=16, num_blocks=200, rows=8, grammars=FuzzGrammars()
        )
        self.standby = StandbyDrill(self.crowded.core, self._rng, combination.standby)
        if combination.has_adapter:
            make_adapter(folder / ADAPTER, case.model, only=_takes_adapter)
            for engine in (self.crowded, self.alone):
                engine.core.adapters.load(ADAPTER, str(folder / ADAPTER))

    def _kind_of(self, case: Case, model: ModelConfig) -> CrowdKind:
        """What the requests of this combination may ask for."""
        combination = self._combination
        return CrowdKind(
            has_adapter=combination.has_adapter,
            has_grammars=combination.has_grammars,
            has_priorities=combination.others["policy"] == "priority",
            pictures=PICTURES[case.name] if isinstance(case, VisionCase) and model.vision is not None else (),
            row_ends=ROW_ENDS if isinstance(case, VisionCase) and case.name == "mistral3" else (),
        )

    def _make_crowded(self, case: Case, checkpoint: Any, folder: Path, more: dict[str, Any]) -> TinyEngine:
        numeric, speculation = self._combination.numeric, self._combination.speculation
        others, draft = dict(self._combination.others), None
        if self._combination.has_disk:
            (folder / "blocks").mkdir(mode=0o700, parents=True)
            others["tiers"] = replace(others["tiers"], disk_path=str(folder / "blocks"), disk_blocks=300)
        if speculation is not None and speculation["method"] == "draft_model":
            draft = _draft_model()
        elif speculation is not None and speculation["method"] == "mtp":
            draft = open_checkpoint(replace(files_at(case.directory), is_head=True))
        self.grammars = FuzzGrammars()
        made = TinyEngine(checkpoint, speculation, draft=draft, grammars=self.grammars, **numeric, **more, **others)
        if speculation is not None:  # drafts are made whether they pay or not
            lengths: Any = made.proposers.lengths  # type: ignore[attr-defined]
            lengths.length = lambda *given, **_: DraftLength(given[1])
        return made

    def run(self) -> None:
        """Raises an AssertionError at the first answer that is not the one its request gets alone."""
        asked, aborted = self._run_crowd()
        stats = self.crowded.core.stats()
        self.met.update({"preempted": stats.preemptions, "drafted": stats.drafted_tokens})
        self.met["from a tier"] += stats.host_hits + stats.disk_hits
        if self._combination.speculation is not None:
            self.met[self._combination.speculation["method"]] += stats.drafted_tokens
        self.met += self.standby.met
        for each in asked:
            if each.name not in aborted:
                self._compare(each)
        error = np.mean(self._differences or [0.0])
        most = quantized_error(self._combination.numeric.get("quantization"))
        assert error < most, f"logprobs differ by {error:.3f} on average: {self._differences}"
        for engine in (self.crowded, self.alone):
            engine.executor.close()

    def _run_crowd(self) -> tuple[list[Asked], set[str]]:
        """Submit all requests at random steps, next turns of ended ones too, and abort some."""
        rng, engine = self._rng, self.crowded
        waiting: list[Asked] = list(random_requests(random.Random(self._combination.seed + 1), self.kind))
        asked: list[Asked] = []
        aborted: set[str] = set()
        for _ in range(MAX_STEPS):
            if not waiting and not engine.core.has_work and not self.standby.is_away:
                return asked, aborted
            self.standby.turn()
            while waiting and not self.standby.refuses and (rng.random() < 0.4 or not engine.core.has_work):
                self._submit(waiting.pop(0), asked)
            if not engine.core.has_work:
                continue
            self.grammars.time += 1
            out = engine.core.step()
            engine.core.check()
            assert engine.core.dead is None, engine.core.dead
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
        said = [token for token in ended.samples[0].token_ids if token < LAST]
        prompt = [*asked.prompt, *said, *rng.choices(range(FIRST, LAST), k=3)]
        return replace(asked, name=f"{asked.name}+", prompt=prompt) if len(prompt) < LONGEST - 25 else None

    def _compare(self, asked: Asked) -> None:
        self.alone.core.reset_cache()
        self.alone.core.submit(asked.submit())
        self.alone.run(check=False)
        found, expected = self.crowded.finished[asked.name], self.alone.finished[asked.name]
        assert found.error is None, f"{asked}: {found.error}"
        assert expected.error is None, f"{asked} alone: {expected.error}"
        if self._combination.keeps_tokens:
            tokens, wanted = _tokens(found), _tokens(expected)
            assert tokens == wanted, f"{asked}: {tokens}, alone {wanted}"
            np.testing.assert_allclose(_logprobs(found), _logprobs(expected), atol=LOGPROB_ERROR, err_msg=str(asked))
        else:
            self._differences += _differences(asked, found, expected)
        self.met["compared"] += 1
        self.met["adapted"] += bool(asked.adapter)
        self.met["beams"] += bool(asked.beam)
        self.met["images"] += bool(asked.images)
        self.met["grammars"] += bool(asked.grammar)
        self.met["beams with grammars"] += bool(asked.grammar and asked.beam)
        self.met["samplers"] += "extra" in asked.sampling
        self.met["cached"] += found.num_cached_tokens > 0


def _takes_adapter(name: str) -> bool:
    return not any(word in name for word in ("experts", "router", "vision", "visual", "projector", "connector"))


def _with_head(case: Case, folder: Path) -> Case:
    """The same model with an MTP head in its files."""
    made = MtpCase(FamilyCase(case.name, folder / "headed"))
    made.save()
    return made.case


def _draft_model() -> MemoryCheckpoint:
    return random_checkpoint(tiny_config(num_layers=1, vocab_size=VOCAB))


def _differences(asked: Asked, found: Finished, expected: Finished) -> list[float]:
    """Compare how many tokens there are in two answers whose tokens may differ, because a level was rounded otherwise.
    Returns the differences of what does not depend on these: the logprobs of the prompt and of an answer's first
    position."""
    tokens, wanted, most = _tokens(found), _tokens(expected), asked.sampling["max_tokens"]
    assert len(tokens) == len(wanted) or asked.beam, f"{asked}: {tokens}, alone {wanted}"
    may_end = asked.beam or asked.end_ids or asked.grammar
    assert all(len(answer) == most or (may_end and 0 < len(answer) < most) for answer in tokens), f"{asked}: {tokens}"
    pairs = []
    if found.prompt_logprobs is not None and expected.prompt_logprobs is not None:
        pairs.append((found.prompt_logprobs.logprobs, expected.prompt_logprobs.logprobs))
    for sample, right in zip(found.samples[:1], expected.samples[:1], strict=True):
        for one, other in zip(sample.logprobs[:1], right.logprobs[:1], strict=True):
            same = 0 if one.token_ids[0] == other.token_ids[0] else 1  # the chosen token may be another
            pairs.append((one.logprobs[same:], other.logprobs[same:]))
    return [0.0 if one == other else abs(one - other) for pair in pairs for one, other in zip(*pair, strict=True)]


def _tokens(finished: Finished) -> list[list[int]]:
    return [list(sample.token_ids) for sample in finished.samples]


def _logprobs(finished: Finished) -> list[float]:
    """All logprobs of an answer: of its samples, and of its prompt."""
    sums = [sample.cumulative_logprob for sample in finished.samples if sample.cumulative_logprob is not None]
    table = finished.prompt_logprobs
    return sums + ([] if table is None else np.asarray(table.logprobs, dtype=np.float64).ravel().tolist())
