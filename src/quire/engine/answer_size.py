"""Answers must fit into messages: what could never be sent is refused at the door."""

from __future__ import annotations

from quire.config.engine import SchedulerConfig
from quire.types.errors import InvalidRequest
from quire.types.request import Submit

MAX_ANSWER = 16 * 2**20  # bytes of one request's terminal message
MAX_STEP_LOGPROBS = 32 * 2**20  # bytes of logprobs in one step's message, were every row to ask for as many
_PAIR = 8  # a token id and its logprob
_ENTRY = 64  # what one position takes besides its pairs
_TOKEN = 5  # a token id at most


def check_answer_size(request: Submit, config: SchedulerConfig, vocab_size: int) -> None:
    """Raise InvalidRequest when a request's answer could be too large for the messages of the engine process."""
    sampling, prompt = request.sampling, len(request.prompt_token_ids)
    room = config.max_model_len - prompt
    outputs = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    entry = _entry_bytes(sampling.logprobs, len(tuple(sampling.logprob_token_ids or ())), vocab_size)
    if entry * config.num_rows > MAX_STEP_LOGPROBS:
        most = MAX_STEP_LOGPROBS // config.num_rows // _PAIR
        raise InvalidRequest("logprobs", f"asks for more than {most} per token, the limit here", "ask for fewer")
    prompt_entry = _entry_bytes(sampling.prompt_logprobs, 0, vocab_size)
    size = sampling.n * outputs * (entry + _TOKEN) + prompt * prompt_entry
    if size > MAX_ANSWER:
        field = "prompt_logprobs" if prompt * prompt_entry > size // 2 else "logprobs" if entry else "max_tokens"
        reason = f"makes the answer up to {size // 2**20} MiB large, limit {MAX_ANSWER // 2**20} MiB"
        raise InvalidRequest(field, reason, "lower it, n or max_tokens")


def _entry_bytes(logprobs: int | None, named: int, vocab_size: int) -> int:
    if logprobs is None:
        return 0
    return _ENTRY + _PAIR * (1 + named + (vocab_size if logprobs < 0 else logprobs))
