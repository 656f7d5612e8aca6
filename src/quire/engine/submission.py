"""A request becomes a group: what it is decoded with, and how many sequences it begins with."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.engine.decoding.beam import BeamSearch
from quire.engine.decoding.controller import PLAIN, StepController
from quire.engine.decoding.grammar import Matcher
from quire.engine.decoding.group import NOT_STREAMED, Group, Sequence
from quire.engine.decoding.stop_text import StopRules, StopText
from quire.engine.decoding.tools import DecodingTools
from quire.engine.kvcache.table import BlockTable
from quire.engine.scheduler.row_table import RowTable
from quire.engine.speculation.proposer import NO_PROPOSER
from quire.types.errors import InvalidRequest
from quire.types.request import Submit

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment


def make_group(request: Submit, ordinal: int, limit: int, handle: int, vocab_size: int, engine_seed: int) -> Group:
    """The group of an admitted request, without sequences yet; its samples answer to `handle` and those after it."""
    sampling, search = request.sampling, None
    if request.beam is not None:
        outputs, num_ends = limit - len(request.prompt_token_ids), len(request.rules.end_ids)
        ends_by_text = bool(sampling.stops or request.rules.grammar)
        search = BeamSearch(request.beam, outputs, num_ends, vocab_size, ends_by_text=ends_by_text)
        sampling = replace(sampling, temperature=0.0)  # what its rows choose by themselves is of no use
    elif sampling.num_sequences > sampling.n and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)  # they are ranked by the logprobs of what they say
    return Group(request, ordinal, limit, _seed_for(request, engine_seed, ordinal), handle, sampling, search)


def add_sequences(group: Group, new_table: Callable[[], BlockTable], controller: StepController) -> None:
    """The sequences a group begins with: one that all beams come from, or all its samples."""
    count = 1 if group.search is not None else group.request.sampling.num_sequences
    for index in range(count):
        own = controller if index == 0 or controller is PLAIN else controller.clone()
        handle = NOT_STREAMED if group.is_ranked else group.handle + index
        group.live.append(Sequence(group, index, handle, new_table(), own))


def make_controller(group: Group, tools: DecodingTools, matcher: Matcher | None) -> StepController:
    """What decides how the group's first sequence goes on; PLAIN if nothing does. Samples that are ranked go on token
    by token if anything decides, so that a replay, which knows a stop text by its end alone, plans the same steps."""
    request, is_beam = group.request, group.search is not None
    stops = None
    if group.is_ranked and request.sampling.stops:
        assert tools.vocabulary is not None
        stops = StopText(StopRules.of(request.sampling, request.rules, tools.vocabulary()))
    proposer = NO_PROPOSER if is_beam else tools.proposers.begin(request)
    if matcher is None and stops is None and proposer is NO_PROPOSER and not is_beam:
        return PLAIN
    return StepController(request.rules, matcher=matcher, proposer=proposer, stops=stops, is_held=group.is_ranked)


def find_origin(request: Submit, groups: Mapping[str, Group], rows: RowTable) -> Sequence | None:
    """The live sequence that a request branches off; None if it is over. Raises InvalidRequest if it is another's."""
    source, prompt = request.source, request.prompt_token_ids
    if source is None:
        return None
    if not 0 < source.num_tokens <= len(prompt):
        reason = f"names {source.num_tokens} tokens of a prompt of {len(prompt)}"
        raise InvalidRequest("source", reason, f"name 1 to {len(prompt)}")
    group = groups.get(source.request_id)
    if group is None:
        return None
    if group.request.cache_salt != request.cache_salt:
        raise InvalidRequest("source", f"{source.request_id!r} has another cache_salt", "use the same")
    if group.is_ranked:
        raise InvalidRequest("source", f"{source.request_id!r} is still ranking its samples", "wait for its end")
    origin = next((sequence for sequence in group.live if sequence.index == source.index), None)
    if origin is None:
        return None
    outputs = origin.outputs if origin.row is None else rows.outputs(origin.row)
    said = group.request.prompt_token_ids + array("i", outputs)
    if said[: source.num_tokens] != prompt[: source.num_tokens]:
        reason = f"has no sample {source.index} that begins with these {source.num_tokens} tokens"
        raise InvalidRequest("source", reason, "send the tokens it was seen to have")
    return origin


def _seed_for(request: Submit, engine_seed: int, ordinal: int) -> int:
    """The user's seed, or one drawn from the engine's seed and the order of arrival (splitmix64)."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    mixed = (engine_seed + (ordinal + 1) * _GOLDEN) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)
