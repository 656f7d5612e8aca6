"""What goes down the stairs: a request, and the wish to end one."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.types.decoding import BeamRules
from quire.types.sampling import SamplingParams, TokenRules


@dataclass(frozen=True, slots=True)
class Submit:
    """One request, tokenized and validated by the text floor."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    rules: TokenRules = field(default_factory=TokenRules)
    priority: int = 0
    cache_salt: str = ""  # prompts share cached blocks only with prompts of the same salt
    beam: BeamRules | None = None  # search with so many beams; sampling.n of the best are returned
    source: Branch | None = None  # where it goes on from, if that is still to be had: then nothing is computed again
    tenant: str = ""  # on whose behalf it is computed
    pin: str = ""  # a name under which its prompt, of whole blocks, stays in the cache when it is done


@dataclass(frozen=True, slots=True)
class Branch:
    """A place in another request's sequence: right after the first `num_tokens` of its prompt and output."""

    request_id: str
    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, or only its sample `index`. Idempotent; an id nobody knows is ignored.

    `stop_reason` is set when the text floor found a stop string: the end then counts as a stop, not an abort.
    """

    request_id: str
    index: int | None = None
    stop_reason: str | None = None
