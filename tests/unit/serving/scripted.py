"""A model that says what a script tells it to, behind the real engine, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.serving.client import InProcessClient
from quire.serving.text.special_tokens import SpecialTokens
from quire.serving.text.tokenizer import Tokenizer
from quire.types.step import (
    Chunk,
    NewRow,
    PromptLogprobs,
    RowFailure,
    RowLogprobs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

EOS = "<end>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """256 tokens, one per byte, and the end of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    eos = backend.token_to_id(EOS)
    return Tokenizer(backend, SpecialTokens(bos_id=None, eos_ids=(eos,), chat_template=TEMPLATE))


TOKENIZER = make_tokenizer()
EOS_ID = TOKENIZER.eos_ids[0]
VOCAB = EOS_ID + 1


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


Script = Callable[[str, int], str]  # prompt, sample index -> what the model says before it ends


@dataclass
class _Row:
    script: list[int]
    position: int
    new: NewRow


class ScriptedExecutor:
    """Follows plans; knows rows only by their prompt. `fails` names prompts whose own code raises."""

    def __init__(self, script: Script, *, depth: int = 1, fails: frozenset[str] = frozenset()) -> None:
        self._script, self.depth, self._fails = script, depth, fails
        self._rows: dict[int, _Row] = {}
        self._results: deque[StepResult] = deque()
        self.on_launch: Callable[[], None] = lambda: None
        self.num_launched = 0

    def launch(self, plan: StepPlan) -> None:
        self.num_launched += 1
        self.on_launch()
        for row in plan.released:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            prompt = TOKENIZER.decode(new.token_ids[: new.num_prompt_tokens].tolist(), skip_special_tokens=False)
            done = len(new.token_ids) - new.num_prompt_tokens
            self._rows[new.row] = _Row([*ids(self._script(prompt, new.sample_index)), EOS_ID], done, new)
        tokens, logprobs, failures = [], [], []
        for number in plan.sample_rows.tolist():
            row = self._rows[number]
            tokens.append(row.script[min(row.position, len(row.script) - 1)])
            row.position += 1
            logprobs += self._logprobs(number, row, tokens[-1])
            prompt = TOKENIZER.decode(row.new.token_ids[: row.new.num_prompt_tokens].tolist())
            if prompt in self._fails:
                failures.append(RowFailure(number, "boom"))
        prompts = tuple(item for chunk in plan.chunks for item in self._prompt_logprobs(chunk))
        token_ids = np.array(tokens, dtype=np.int32)
        self._results.append(StepResult(plan.step, token_ids, tuple(logprobs), prompts, tuple(failures)))

    def _logprobs(self, number: int, row: _Row, token: int) -> list[RowLogprobs]:
        wanted = row.new.sampling.logprobs
        if wanted is None:
            return []
        return [RowLogprobs(number, _entry(token, wanted, tuple(row.new.sampling.logprob_token_ids or ())))]

    def _prompt_logprobs(self, chunk: Chunk) -> list[PromptLogprobs]:
        new = self._rows[chunk.row].new
        wanted = new.sampling.prompt_logprobs
        last = min(chunk.start + chunk.num_tokens, new.num_prompt_tokens - 1)
        if wanted is None or chunk.start >= last:
            return []
        entries = tuple(_entry(int(new.token_ids[place]), wanted) for place in range(chunk.start + 1, last + 1))
        return [PromptLogprobs(chunk.row, chunk.start + 1, entries)]

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._rows.clear()


def _entry(token: int, wanted: int, named: tuple[int, ...] = ()) -> TokenLogprobs:
    others = [*((token + 1 + i) % VOCAB for i in range(wanted)), *named]
    values = [-1.5, *(-0.5 - i for i in range(len(others)))]
    return TokenLogprobs(np.array([token, *others], dtype=np.int32), np.array(values, dtype=np.float32), rank=9)


CACHE = CacheConfig(block_size=4, num_blocks=512)
SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)


def make_client(executor: ScriptedExecutor) -> InProcessClient:
    return InProcessClient(EngineCore(executor, CACHE, SCHEDULER, VOCAB))
