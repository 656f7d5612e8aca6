"""The input of the engine: a request, and the order to abort one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.types.decoding import BeamRules
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage, key_tokens
from quire.types.pooling import PoolingWork
from quire.types.sampling import SamplingParams, TokenRules

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array


def pack_tokens(tokens: Iterable[int]) -> TokenIds:
    """Return tokens as an array of int32, which takes four bytes per token and no work of the garbage collector. Raises
    InvalidRequest if a token is no int32."""
    try:
        return array("i", tokens)
    except (TypeError, OverflowError):
        raise InvalidRequest("prompt", "holds a token id that is no int32", "send token ids of the model") from None


@dataclass(frozen=True, slots=True)
class Submit:
    """One request, tokenized and validated by the serving layer. Any sequence of token ids becomes an array."""

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    rules: TokenRules = field(default_factory=TokenRules)
    priority: int = 0
    cache_salt: str = ""  # requests share cached blocks only if their salts are equal
    beam: BeamRules | None = None  # beam search; the best sampling.n answers are returned
    source: Branch | None = None  # where it branches off; its blocks are reused if they still exist
    tenant: str = ""  # the client that it runs for; the fair policy shares by it
    pin: str = ""  # if set: keep the prompt pinned under this name after the request
    images: tuple[PromptImage, ...] = ()  # of the prompt, by their place in it
    adapter: str = ""  # the name of its LoRA adapter; empty: the model as it is
    pooling: PoolingWork | None = None  # if set: each of its texts becomes a row of numbers; nothing is generated
    adapter_digest: str = ""  # of that adapter; the engine sets it when it accepts the request
    prefilled: bool = False  # another engine has just computed its prompt: its blocks are awaited

    @property
    def cache_root(self) -> str:
        """Requests share cached blocks only if this is equal: it tells apart salts and adapters. A request without an
        adapter has its salt."""
        if self.adapter_digest:
            return f"\0{self.adapter_digest}\0{self.cache_salt}"
        return f"\0\0{self.cache_salt}" if self.cache_salt.startswith("\0") else self.cache_salt

    @property
    def key_tokens(self) -> bytes:
        """The int32 bytes by which the blocks of its prompt are cached."""
        return key_tokens(self.prompt_token_ids, self.images) if self.images else self.prompt_token_ids.tobytes()

    def __post_init__(self) -> None:
        given: object = self.prompt_token_ids  # may be of any type: annotations are not checked at run time
        if not isinstance(given, array) or given.typecode != "i":
            object.__setattr__(self, "prompt_token_ids", pack_tokens(self.prompt_token_ids))


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
