"""The input of the engine: a request, and the order to abort one."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.types.decoding import BeamRules
from quire.types.sampling import SamplingParams, TokenRules


@dataclass(frozen=True, slots=True)
class Submit:
    """One request, tokenized and validated by the serving layer."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    rules: TokenRules = field(default_factory=TokenRules)
    priority: int = 0
    cache_salt: str = ""  # requests share cached blocks only if their salts are equal
    beam: BeamRules | None = None  # beam search; the best sampling.n answers are returned
    source: Branch | None = None  # where it branches off; its blocks are reused if they still exist
    tenant: str = ""  # the client that it runs for; the fair policy shares by it
    pin: str = ""  # if set: keep the prompt pinned under this name after the request


@dataclass(frozen=True, slots=True)
class Branch:
    """A position in a sample of another request: after the first `num_tokens` tokens of its prompt and output."""

    request_id: str
    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, or only its sample `index`. Idempotent; unknown ids are ignored.

    The serving layer sets `stop_reason` when it finds a stop string: the finish reason is then "stop", not "abort".
    """

    request_id: str
    index: int | None = None
    stop_reason: str | None = None
