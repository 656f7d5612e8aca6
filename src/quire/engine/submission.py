"""Checks a submitted request, and makes its group, its sequences and their controller. EngineCore.submit calls it; the
server's edges call the checks before they submit."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Mapping
from dataclasses import replace

import numpy as np

from quire.config.engine import CacheConfig, SchedulerConfig
from quire.config.policy import RESERVING
from quire.config.vision import FEWEST_TOKENS, ImageLimits
from quire.engine.decoding.beam import BeamSearch
from quire.engine.decoding.controller import PLAIN, Ending, Fault, StepController
from quire.engine.decoding.grammar import Matcher
from quire.engine.decoding.group import NOT_STREAMED, Group, Sequence
from quire.engine.decoding.stop_text import StopRules, StopText
from quire.engine.decoding.tools import DecodingTools
from quire.engine.kvcache.contiguous import reserved_tokens
from quire.engine.kvcache.keys import TOKEN_BYTES
from quire.engine.kvcache.table import BlockTable
from quire.engine.scheduler.row_table import RowTable
from quire.engine.speculation.proposer import NO_PROPOSER
from quire.types.errors import InvalidRequest
from quire.types.images import KEY_BYTES, MAX_PIXEL_BYTES
from quire.types.output import Finished, SampleEnd
from quire.types.request import Submit
from quire.types.sampling import check_vocabulary

MAX_ANSWER = 16 * 2**20  # bytes of one request's terminal message
MAX_STEP_LOGPROBS = 32 * 2**20  # bytes of logprobs in one step's message, if every row requested the same
FEWER_SCORED = "or raise prompt_logprobs_start"
_PAIR = 8  # bytes of a token id and its logprob
_ENTRY = 64  # bytes of one position in addition to its pairs
_RANK = 4  # the same for prompt positions, which are in one table
_TOKEN = 5  # most bytes of a token id
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_MAX_INT32, _MAX_UINT64 = 2**31 - 1, 2**64 - 1
_UINT32 = np.dtype(np.uint32)


# ------------------------------------------------------------------------------------------------- checks
def check_request(
    request: Submit,
    cache: CacheConfig,
    config: SchedulerConfig,
    vocab_size: int,
    *,
    has_text: bool = False,
    num_pinned: int = 0,
) -> int:
    """Check a request. Returns how many tokens each of its sequences may reach, prompt included.

    Raises InvalidRequest naming field, limit and fix. `num_pinned` blocks cannot be used by requests. `has_text`: the
    engine has a vocabulary, which stop strings of ranked samples need.
    """
    prompt, sampling = len(request.prompt_token_ids), request.sampling
    _check_types(request)
    if request.pooling is not None:
        _check_pooling(request)
    if prompt == 0:
        raise InvalidRequest("prompt", "is empty", "send at least one token")
    if prompt >= config.max_model_len:
        raise InvalidRequest(
            "prompt",
            f"has {prompt} tokens, which leaves no room in max_model_len={config.max_model_len}",
            f"shorten it to {config.max_model_len - 1} tokens or raise max_model_len",
        )
    is_single = request.beam is None and sampling.n == 1 and sampling.best_of is None
    if not is_single:
        _check_sequences(request, config, has_text=has_text)
    if request.priority and config.policy != "priority":
        reason = f"means nothing to the {config.policy!r} policy"
        raise InvalidRequest("priority", reason, 'leave it out or use policy="priority"')
    if np.maximum.reduce(np.frombuffer(request.prompt_token_ids, _UINT32)) >= vocab_size:  # a negative id is higher
        check_vocabulary("prompt", request.prompt_token_ids, vocab_size)
    if request.images or config.images is not None:
        check_images(request, config.images)
    if request.rules.bad_words:
        check_vocabulary("bad_words", [token for word in request.rules.bad_words for token in word], vocab_size)
    if sampling.stop_token_ids or sampling.allowed_token_ids or sampling.logit_bias or sampling.logprob_token_ids:
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            check_vocabulary(field, getattr(sampling, field) or (), vocab_size)
    if (sampling.prompt_logprobs_start or 0) > prompt:
        reason = f"is {sampling.prompt_logprobs_start}, and the prompt has {prompt} tokens"
        raise InvalidRequest("prompt_logprobs_start", reason, f"use at most {prompt}")
    room = config.max_model_len - prompt
    limit = prompt + (room if sampling.max_tokens is None else min(sampling.max_tokens, room))
    fits_alone = is_single and limit <= (cache.num_blocks - num_pinned) * cache.block_size
    if not fits_alone or cache.groups.window is not None:
        _check_fits(request, limit, cache, num_pinned, config.max_num_batched_tokens)
    if config.policy in RESERVING:
        _check_reservation(request, limit, cache, config)
    return limit


def _check_pooling(request: Submit) -> None:
    """Raise InvalidRequest unless a pooling request has exactly one text and one sample: the hidden state of the
    prompt's last token comes with its first sample."""
    work, sampling = request.pooling, request.sampling
    assert work is not None
    if len(work.lengths) != 1 or work.first_parts:
        raise InvalidRequest("input", "must be one text for each request to this model", "send texts one by one")
    if sampling.max_tokens != 1 or sampling.num_sequences != 1 or request.beam is not None or request.rules.grammar:
        raise InvalidRequest("pooling", "allows exactly one sampled token", "leave sampling out")


def _check_types(request: Submit) -> None:
    """Raise InvalidRequest if a field has another type than its annotation. Otherwise the scheduler would fail on it
    later, and end every request."""
    if not type(request.cache_salt) is type(request.tenant) is type(request.pin) is type(request.adapter) is str:
        for field in ("cache_salt", "tenant", "pin", "adapter"):
            if not isinstance(getattr(request, field), str):
                raise InvalidRequest(field, f"is {getattr(request, field)!r}, not a text", "send a string")
    if type(request.priority) is not int:
        raise InvalidRequest("priority", f"is {request.priority!r}, not a whole number", "send an integer")
    for token in request.rules.end_ids:
        if not 0 <= token <= _MAX_INT32:
            raise InvalidRequest("stop_token_ids", f"names token {token}, which is no int32", "use ids of the model")


def check_images(request: Submit, limits: ImageLimits | None) -> None:
    """Check the images of a request against the placeholders in its prompt. Raises InvalidRequest."""
    images, prompt = request.images, request.prompt_token_ids
    if limits is None:
        if images:
            raise InvalidRequest("images", "this engine takes text only", "leave them out, or use a model with vision")
        return
    if len(images) > limits.max_images * limits.grid.max_pieces:
        reason = f"are {len(images)}, limit {limits.max_images * limits.grid.max_pieces}"
        raise InvalidRequest("images", reason, "send fewer, or raise limit_mm_per_prompt")
    grid, end = limits.grid, 0
    for image in images:
        fits = FEWEST_TOKENS <= image.num_tokens <= grid.max_tokens and image.gap == len(grid.row_ends[:1])
        if image.start < end or image.rows < 1 or not fits:
            reason = f"an image of {image.rows} x {image.columns} tokens at {image.start} cannot be placed"
            raise InvalidRequest("images", reason, f"an image has {FEWEST_TOKENS} to {grid.max_tokens} tokens")
        if not grid.fits(image) or len(image.key) != KEY_BYTES:
            raise InvalidRequest("images", "an image's pixels do not match its size", "resize it as the model asks")
        end = image.end
    if sum(len(image.pixels) for image in images) > MAX_PIXEL_BYTES:
        reason = f"have more than {MAX_PIXEL_BYTES // 3:,} pixels in all"
        raise InvalidRequest("images", reason, "send fewer or smaller ones, or set mm_processor_kwargs")
    covered = sum(prompt[image.start : image.end].count(grid.token_id) for image in images)
    wanted = sum(image.num_placeholders for image in images)
    if covered != wanted or prompt.count(grid.token_id) != wanted:
        reason = f"has {prompt.count(grid.token_id)} placeholders of images, and {wanted} tokens of images were sent"
        raise InvalidRequest("prompt", reason, "send an image for each placeholder, and no placeholder in text")


def num_sequences(request: Submit) -> int:
    """Return how many sequences of a request can be live at once."""
    return request.sampling.num_sequences if request.beam is None else request.beam.width


def _check_sequences(request: Submit, config: SchedulerConfig, *, has_text: bool) -> None:
    sampling, beam, count = request.sampling, request.beam, num_sequences(request)
    field = "beam_width" if beam is not None else "best_of" if count > sampling.n else "n"
    if count > config.num_rows:
        reason = f"is {count}, above the {config.num_rows} sequences of a step"
        raise InvalidRequest(field, reason, "lower it or raise max_num_seqs")
    if beam is not None and sampling.n > beam.width:
        raise InvalidRequest("n", f"is {sampling.n}, above beam_width={beam.width}", "lower it or raise beam_width")
    if beam is not None and sampling.best_of is not None:
        raise InvalidRequest("best_of", "has no effect in a beam search", "leave it out or set beam_width")
    if beam is not None and sampling.logprobs is not None:
        raise InvalidRequest("logprobs", "are not available with beam search", "read cumulative_logprob")
    if field == "n":
        return
    if sampling.repetition_detection is not None:
        raise InvalidRequest("repetition_detection", f"does not work with {field}", "leave one of them out")
    if sampling.stops and not has_text:
        raise InvalidRequest(
            "stop", f"needs text with {field}, but this engine has no vocabulary", "use stop_token_ids"
        )


def blocks_at_most(prompt: int, limit: int, n: int, block_size: int) -> int:
    """Return the most blocks that a group can hold: its full prompt blocks once, and the others once for each of its
    `n` sequences. The last token is never written to the cache."""
    shared = prompt // block_size
    return shared + n * (-(-(limit - 1) // block_size) - shared)


def most_blocks(request: Submit, limit: int, cache: CacheConfig, max_chunk: int) -> int:
    """Return the most blocks that a request can hold if its sequences reach `limit` tokens, window blocks included. A
    step computes up to `max_chunk` tokens of a sequence."""
    size, count, groups = cache.block_size, num_sequences(request), cache.groups
    total = blocks_at_most(len(request.prompt_token_ids), limit, count, size)
    if groups.window is None:
        return total
    if groups.all_windows:
        return min(total, count * groups.blocks_needed(total, size, max_chunk))
    if count == 1:
        return groups.blocks_needed(total, size, max_chunk)
    shared = len(request.prompt_token_ids) // size
    own = (total - shared) // count
    return groups.blocks_needed(shared, size, max_chunk) + count * groups.blocks_needed(own, size, max_chunk)


def _check_fits(request: Submit, limit: int, cache: CacheConfig, num_pinned: int, max_chunk: int) -> None:
    needed = most_blocks(request, limit, cache, max_chunk)
    if needed > cache.num_blocks - num_pinned:
        count = num_sequences(request)
        more = needed - blocks_at_most(len(request.prompt_token_ids), limit, count, cache.block_size)
        windows = f", {more} of them window blocks" if more > 0 else ""
        held = f", {num_pinned} of them for resident prefixes" if num_pinned else ""
        raise InvalidRequest(
            "max_tokens",
            f"{count} x {limit} tokens need {needed} kv blocks of {cache.block_size}{windows}, the cache has "
            f"{cache.num_blocks}{held}",
            "lower max_tokens, n or the prompt, or raise num_kv_blocks / kv_cache_memory",
        )


def _check_reservation(request: Submit, limit: int, cache: CacheConfig, config: SchedulerConfig) -> None:
    count = num_sequences(request)
    if count > 1:
        field = "beam_width" if request.beam is not None else "best_of" if count > request.sampling.n else "n"
        reason = f"is {count}, and the {config.policy!r} policy shares no memory between sequences"
        raise InvalidRequest(field, reason, "leave it out or use another policy")
    reserved = reserved_tokens(config.policy, len(request.prompt_token_ids), limit, config.max_model_len)
    if -(-reserved // cache.block_size) > cache.num_blocks:
        reason = f"makes the {config.policy!r} policy reserve {reserved} tokens, the cache has {cache.num_slots}"
        raise InvalidRequest("max_tokens", reason, "lower it or max_model_len, or raise num_kv_blocks")


def check_answer_size(request: Submit, config: SchedulerConfig, vocab_size: int) -> None:
    """Raise InvalidRequest if the request's answer could exceed the size limit of messages between processes."""
    sampling, prompt = request.sampling, len(request.prompt_token_ids)
    room = config.max_model_len - prompt
    outputs = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    entry = _entry_bytes(sampling.logprobs, len(tuple(sampling.logprob_token_ids or ())), vocab_size)
    if entry * config.num_rows > MAX_STEP_LOGPROBS:
        most = MAX_STEP_LOGPROBS // config.num_rows // _PAIR
        raise InvalidRequest("logprobs", f"asks for more than {most} per token, the limit here", "ask for fewer")
    of_prompt = prompt_logprob_bytes(request, vocab_size)
    size = sampling.n * outputs * (entry + _TOKEN) + of_prompt
    if size > MAX_ANSWER:
        field = "prompt_logprobs" if of_prompt > size // 2 else "logprobs" if entry else "max_tokens"
        reason = f"makes the answer up to {size // 2**20} MiB large, limit {MAX_ANSWER // 2**20} MiB"
        fix = "lower it, n or max_tokens"
        raise InvalidRequest(field, reason, f"{fix}, {FEWER_SCORED}" if field == "prompt_logprobs" else fix)


def tokens_that_fit(request: Submit, vocab_size: int) -> int:
    """Return the most tokens that each answer to a request can have within the limit of `check_answer_size`."""
    sampling = request.sampling
    entry = _entry_bytes(sampling.logprobs, len(tuple(sampling.logprob_token_ids or ())), vocab_size)
    return max(MAX_ANSWER - prompt_logprob_bytes(request, vocab_size), 0) // (sampling.n * (entry + _TOKEN))


def prompt_logprob_bytes(request: Submit, vocab_size: int) -> int:
    """Return the size in bytes of the logprobs of a request's prompt, counted once for each of its `n` answers."""
    sampling = request.sampling
    entry = _entry_bytes(sampling.prompt_logprobs, 0, vocab_size, _RANK)
    num_scored = max(len(request.prompt_token_ids) - max(sampling.prompt_logprobs_start or 0, 1), 0)
    return sampling.n * num_scored * entry


def _entry_bytes(logprobs: int | None, named: int, vocab_size: int, besides: int = _ENTRY) -> int:
    """Return the size in bytes of the logprobs of one position."""
    if logprobs is None:
        return 0
    return besides + _PAIR * (1 + named + (vocab_size if logprobs < 0 else logprobs))


# ------------------------------------------------------------------------------------------------- groups
def make_group(request: Submit, ordinal: int, limit: int, handle: int, vocab_size: int, engine_seed: int) -> Group:
    """Make the group of a checked request, without sequences. Its sample i has the handle `handle` + i."""
    sampling, search = request.sampling, None
    if request.beam is not None:
        outputs, num_ends = limit - len(request.prompt_token_ids), len(request.rules.end_ids)
        ends_by_text = bool(sampling.stops or request.rules.grammar)
        search = BeamSearch(request.beam, outputs, num_ends, vocab_size, ends_by_text=ends_by_text)
        sampling = replace(sampling, temperature=0.0)  # the search uses the candidates, not the sampled tokens
    elif sampling.best_of is not None and sampling.best_of > sampling.n and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)  # its samples are ranked by the logprobs of their tokens
    return Group(request, ordinal, limit, _seed_for(request, engine_seed, ordinal), handle, sampling, search)


def add_sequences(group: Group, new_table: Callable[[], BlockTable], controller: StepController) -> None:
    """Add the first sequences of a group: one for a beam search, otherwise one for each sample."""
    sampling = group.request.sampling
    count = 1 if group.search is not None else sampling.best_of or sampling.n
    for index in range(count):
        own = controller if index == 0 or controller is PLAIN else controller.clone()
        handle = NOT_STREAMED if group.is_ranked else group.handle + index
        group.live.append(Sequence(group, index, handle, new_table(), own))


def make_controller(group: Group, tools: DecodingTools, matcher: Matcher | None) -> StepController:
    """Make the StepController of a group's first sequence; PLAIN if it needs no grammar, drafts or stop strings.

    A controller of ranked samples always paces them. A replay, which only knows where a stop string ended a sample,
    then plans the same steps.
    """
    request, is_beam = group.request, group.search is not None
    stops = None
    if group.is_ranked and request.sampling.stops:
        assert tools.vocabulary is not None
        stops = StopText(StopRules.of(request.sampling, request.rules, tools.vocabulary()))
    proposer = NO_PROPOSER if is_beam else tools.proposers.begin(request)
    if matcher is None and stops is None and proposer is NO_PROPOSER and not is_beam:
        return PLAIN
    return StepController(request.rules, matcher=matcher, proposer=proposer, stops=stops, always_paced=group.is_ranked)


def find_origin(request: Submit, groups: Mapping[str, Group], rows: RowTable) -> Sequence | None:
    """Return the live sequence from which a request branches; None if it has ended. Raises InvalidRequest if the
    request may not branch from it."""
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
    if group.request.adapter_digest != request.adapter_digest:
        return None  # the tokens are equal, but their keys and values differ
    if group.is_ranked:
        raise InvalidRequest("source", f"{source.request_id!r} is still ranking its samples", "wait for its end")
    origin = next((sequence for sequence in group.live if sequence.index == source.index), None)
    if origin is None:
        return None
    outputs = origin.outputs if origin.row is None else rows.outputs(origin.row)
    known, count = group.prompt + array("i", outputs).tobytes(), source.num_tokens * TOKEN_BYTES
    if known[:count] != request.key_tokens[:count]:
        reason = f"has no sample {source.index} that begins with these {source.num_tokens} tokens"
        raise InvalidRequest("source", reason, "send the tokens it was seen to have")
    return origin


def end_uncompiled(group: Group, index: int | None, ending: Ending) -> bool:
    """End samples of a group whose grammar is being compiled, and which has no sequences yet. Returns whether all of
    them have ended."""
    if index is not None and group.is_ranked:
        return False
    count, over = group.request.sampling.n, {sample.index for sample in group.ended}
    for each in range(count) if index is None else [index] if 0 <= index < count else []:
        if each not in over:
            group.ended.append(SampleEnd(each, (), *ending))
    return len(group.ended) == count


def _seed_for(request: Submit, engine_seed: int, ordinal: int) -> int:
    """Return the request's seed, or one derived from the engine's seed and the ordinal of the request (splitmix64)."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    mixed = (engine_seed + (ordinal + 1) * _GOLDEN) & _MAX_UINT64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MAX_UINT64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MAX_UINT64
    return mixed ^ (mixed >> 31)


def check_id(request_id: object, live: Container[object]) -> None:
    """Raise InvalidRequest for a request id that is no text or that a live request has."""
    if not isinstance(request_id, str):
        raise InvalidRequest("request_id", f"is {request_id!r}, not a text", "send a string")
    if request_id in live:
        raise InvalidRequest("request_id", f"{request_id!r} is in use", "choose another or wait for its end")


def fault_message(group: Group, fault: Fault, now: float) -> Finished:
    """Return the terminal message of a request that failed."""
    try:
        return group.finish_message(now, *fault)
    except Exception:  # noqa: BLE001 - if making the message failed, the request must end all the same
        return Finished(group.request.request_id, tuple(group.ended), error=fault.reason)
