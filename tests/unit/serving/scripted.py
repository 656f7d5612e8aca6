"""A model that says what a script tells it to, behind the real engine, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.decoding.grammar_compiler import GrammarCompiler
from quire.engine.decoding.tools import DecodingTools
from quire.serving.client import InProcessClient
from quire.serving.text.special_tokens import SpecialTokens
from quire.serving.text.token_table import vocabulary_source
from quire.serving.text.tokenizer import Tokenizer
from quire.types.adapters import NO_ADAPTER, AdapterInfo
from quire.types.errors import InvalidRequest
from quire.types.step import (
    Candidates,
    Chunk,
    LogprobTable,
    Masks,
    NewRow,
    PromptLogprobs,
    RowFailure,
    RowLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.types.transfer import NOTHING_MOVED, TransferReport

EOS = "<end>"
MARKS = ("[THINK]", "[/THINK]")  # one token each, not special
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """256 tokens, one per byte, the end of text, and the marks of reasoning of one format."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    backend.add_tokens(list(MARKS))
    eos = backend.token_to_id(EOS)
    return Tokenizer(backend, SpecialTokens(bos_id=None, eos_ids=(eos,), chat_template=TEMPLATE))


TOKENIZER = make_tokenizer()
EOS_ID = TOKENIZER.eos_ids[0]
VOCAB = EOS_ID + 1 + len(MARKS)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


Script = Callable[[str, int], str]  # prompt, sample index -> what the model says before it ends


@dataclass
class _Row:
    script: list[int]
    tokens: list[int]
    new: NewRow

    def after(self, length: int) -> int:
        """What the script has after the first `length` tokens."""
        return self.script[min(length - self.new.num_prompt_tokens, len(self.script) - 1)]


class ScriptedExecutor:
    """Follows plans; knows rows only by their prompt. `fails` names prompts whose own code raises. A row with a LoRA
    adapter says the adapter's digest first.

    A masked sample says the first token that is allowed where the script's is not. A row with candidates has the
    script's token far ahead of all others.
    """

    def __init__(self, script: Script, *, depth: int = 1, fails: frozenset[str] = frozenset()) -> None:
        self._script, self.depth, self._fails = script, depth, fails
        self._rows: dict[int, _Row] = {}
        self._results: deque[StepResult] = deque()
        self._owed: StepPlan | None = None  # the guided plan whose masks have not come
        self.on_launch: Callable[[], None] = lambda: None
        self.logprob: Callable[[int], float] = lambda index: -1.5  # of every token of a sample
        self.num_launched = 0
        self.adapters: set[str] = set()  # digests in host memory
        self.slots: dict[int, str] = {}  # what plans have put into the slots

    def launch(self, plan: StepPlan) -> None:
        assert self._owed is None, "a plan is launched before the masks of the last one were supplied"
        self.num_launched += 1
        self.on_launch()
        for row in plan.released:
            self._rows.pop(row, None)
        self.slots |= dict(plan.adapters)
        for new in plan.new_rows:
            prompt = TOKENIZER.decode(new.token_ids[: new.num_prompt_tokens].tolist(), skip_special_tokens=False)
            named = "" if new.adapter == NO_ADAPTER else f"{self.slots[new.adapter]}:"
            script = [*ids(named + self._script(prompt, new.sample_index)), EOS_ID]
            self._rows[new.row] = _Row(script, new.token_ids.tolist(), new)
        for write in plan.writes:
            self._rows[write.row].tokens[write.start :] = write.token_ids.tolist()
        if plan.guided:
            self._owed = plan
        else:
            self._results.append(self._sample(plan, plan.masks))

    def read_adapter(self, name: str, folder: str) -> AdapterInfo:
        """The digest of an adapter is the name of its folder."""
        digest = folder.rsplit("/", 1)[-1]
        if digest.startswith("bad"):
            raise InvalidRequest("lora_path", f"{digest} is no adapter", "name another folder")
        self.adapters.add(digest)
        return AdapterInfo(name, digest, 8, 1_000, folder)

    def forget_adapter(self, digest: str) -> None:
        self.adapters.remove(digest)

    def supply_masks(self, masks: Masks | None) -> None:
        plan, self._owed = self._owed, None
        assert plan is not None, "masks were supplied for a plan that waits for none"
        self._results.append(self._sample(plan, masks))

    def _sample(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        allowed, samples = _allowed(masks), self._samples(plan)
        tokens, logprobs, failures = [], [], []
        for place, (number, length, _) in enumerate(samples):
            row = self._rows[number]
            token = row.after(length)
            if place in allowed and not allowed[place][token]:
                token = int(np.flatnonzero(allowed[place])[0])
            tokens.append(token)
            logprobs += self._logprobs(number, row, token)
            if TOKENIZER.decode(row.tokens[: row.new.num_prompt_tokens]) in self._fails:
                failures.append(RowFailure(number, "boom"))
        candidates = self._candidates(samples, allowed)
        for (number, _, grows), token in zip(samples, tokens, strict=True):
            if grows:
                self._rows[number].tokens.append(token)
        prompts = tuple(item for chunk in plan.chunks for item in self._prompt_logprobs(chunk))
        token_ids = np.array(tokens, dtype=np.int32)
        return StepResult(plan.step, token_ids, tuple(logprobs), prompts, tuple(failures), candidates)

    def _samples(self, plan: StepPlan) -> list[tuple[int, int, bool]]:
        """(row, tokens it follows, whether the row grows by it) of every sample."""
        samples = [(row, len(self._rows[row].tokens), True) for row in plan.decode_rows.tolist()]
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            if chunk.num_sampled > 1:
                samples += [(chunk.row, end - back, False) for back in range(chunk.num_sampled - 1, -1, -1)]
            else:
                samples += [(row, end, True) for row in chunk.sample_rows]
        return samples

    def _candidates(
        self, samples: list[tuple[int, int, bool]], allowed: dict[int, npt.NDArray[np.bool_]]
    ) -> Candidates | None:
        found = [place for place, (row, _, _) in enumerate(samples) if self._rows[row].new.num_candidates]
        if not found:
            return None
        scores = np.tile(-2.0 - 0.01 * np.arange(VOCAB, dtype=np.float32), (len(found), 1))
        for line, place in enumerate(found):
            scores[line, self._rows[samples[place][0]].after(samples[place][1])] = -0.1
            if place in allowed:
                scores[line, ~allowed[place]] = -np.inf
        width = max(self._rows[samples[place][0]].new.num_candidates for place in found)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :width].astype(np.int32)
        return Candidates(np.array(found, dtype=np.int32), order, np.take_along_axis(scores, order, axis=1))

    def _logprobs(self, number: int, row: _Row, token: int) -> list[RowLogprobs]:
        wanted = row.new.sampling.logprobs
        if wanted is None:
            return []
        named = tuple(row.new.sampling.logprob_token_ids or ())
        return [RowLogprobs(number, _entry(token, wanted, named, self.logprob(row.new.sample_index)))]

    def _prompt_logprobs(self, chunk: Chunk) -> list[PromptLogprobs]:
        new = self._rows[chunk.row].new
        wanted = new.sampling.prompt_logprobs
        last = min(chunk.start + chunk.num_tokens, new.num_prompt_tokens - 1)
        if wanted is None or chunk.start >= last:
            return []
        start = max(chunk.start + 1, new.sampling.prompt_logprobs_start or 0)
        entries = [_entry(int(new.token_ids[place]), wanted) for place in range(start, last + 1)]
        if not entries:
            return []
        ids, values = (np.concatenate(part) for part in zip(*((e.token_ids, e.logprobs) for e in entries), strict=True))
        ranks = np.array([entry.rank for entry in entries], dtype=np.int32)
        return [PromptLogprobs(chunk.row, LogprobTable(start, ids, values, ranks))]

    def collect(self) -> StepResult:
        return self._results.popleft()

    def transfers(self) -> TransferReport:
        return NOTHING_MOVED

    def close(self) -> None:
        self._rows.clear()


def _allowed(masks: Masks | None) -> dict[int, npt.NDArray[np.bool_]]:
    """Which tokens each masked sample may say, by its place."""
    if masks is None:
        return {}
    bits = np.unpackbits(np.ascontiguousarray(masks.bits).view(np.uint8), axis=1, bitorder="little")
    return dict(zip(masks.samples.tolist(), bits[:, :VOCAB].astype(bool), strict=True))


def _entry(token: int, wanted: int, named: tuple[int, ...] = (), value: float = -1.5) -> TokenLogprobs:
    others = [*((token + 1 + i) % VOCAB for i in range(wanted)), *named]
    values = [value, *(-0.5 - i for i in range(len(others)))]
    return TokenLogprobs(np.array([token, *others], dtype=np.int32), np.array(values, dtype=np.float32), rank=9)


CACHE = CacheConfig(block_size=4, num_blocks=512)
SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)


def make_tools() -> DecodingTools:
    """What the engine needs for grammars and stop strings of beams."""
    vocabulary = vocabulary_source(TOKENIZER)
    return DecodingTools(GrammarCompiler(vocabulary, VOCAB), vocabulary=vocabulary, checked_only=True)


def make_client(executor: ScriptedExecutor) -> InProcessClient:
    return InProcessClient(EngineCore(executor, CACHE, SCHEDULER, VOCAB, tools=make_tools()))
