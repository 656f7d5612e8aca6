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
from quire.types.step import NewRow, RowFailure, RowLogprobs, StepPlan, StepResult, TokenLogprobs

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
        self._results.append(
            StepResult(plan.step, np.array(tokens, dtype=np.int32), tuple(logprobs), failures=tuple(failures))
        )

    def _logprobs(self, number: int, row: _Row, token: int) -> list[RowLogprobs]:
        wanted = row.new.sampling.logprobs
        if wanted is None:
            return []
        others = [(token + 1 + i) % VOCAB for i in range(wanted)]
        values = [-1.5, *(-0.5 - i for i in range(wanted))]
        entry = TokenLogprobs(np.array([token, *others], dtype=np.int32), np.array(values, dtype=np.float32), rank=9)
        return [RowLogprobs(number, entry)]

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._rows.clear()


CACHE = CacheConfig(block_size=4, num_blocks=512)
SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)


def make_client(executor: ScriptedExecutor) -> InProcessClient:
    return InProcessClient(EngineCore(executor, CACHE, SCHEDULER, VOCAB))
