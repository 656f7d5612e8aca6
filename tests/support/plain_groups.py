"""Groups and sequences as the engine has them, without an engine."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds

from quire.engine.decoding.controller import PLAIN, StepController
from quire.engine.decoding.group import Group, Sequence
from quire.engine.kvcache.pool import BlockPool
from quire.engine.kvcache.table import BlockTable
from quire.types.request import Submit
from quire.types.sampling import SamplingParams, TokenRules


def make_group(
    prompt: TokenIds[int], ordinal: int = 0, *, max_tokens: int = 8, end_ids: tuple[int, ...] = (), salt: str = ""
) -> Group:
    """A group without sequences."""
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Submit(f"r{ordinal}", tuple(prompt), sampling, TokenRules(end_ids=end_ids), cache_salt=salt)
    return Group(request, ordinal, len(request.prompt_token_ids) + max_tokens, ordinal, 10 * ordinal, sampling)


def add_sequence(
    group: Group, table: BlockTable | None = None, controller: StepController = PLAIN, *, is_streamed: bool = True
) -> Sequence:
    """One more sequence of a group."""
    index, table = len(group.live), table or BlockTable(BlockPool(0), 1)
    sequence = Sequence(group, index, group.handle + index if is_streamed else -1, table, controller)
    group.live.append(sequence)
    return sequence
