"""The input of the engine: requests (Submit), and messages that abort them (Abort)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct
from struct import error as PackError
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
    """Return tokens as an array of int32, which takes four bytes per token and which the garbage collector need not
    scan. Raises InvalidRequest if a token is not an int32."""
    try:
        known = tokens if isinstance(tokens, tuple | list) else tuple(tokens)
        return array("i", _packer(len(known))(*known))  # faster than to convert token by token
    except (TypeError, PackError):
        raise InvalidRequest("prompt", "holds a token id that is no int32", "send token ids of the model") from None


@lru_cache(maxsize=4_096)
def _packer(count: int) -> Callable[..., bytes]:
    """Return the function that packs `count` tokens. struct.pack itself remembers 100 formats, and then forgets all."""
    return Struct(f"{count}i").pack


@dataclass(slots=True)  # not frozen: a frozen one of this many fields takes three times as long to make
class Submit:
    """One request, tokenized and validated by the serving layer. Any sequence of token ids is converted to an array.
    Never changed after it is made."""

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    rules: TokenRules = field(default_factory=TokenRules)
    priority: int = 0
    cache_salt: str = ""  # requests share cached blocks only if their salts are equal
    beam: BeamRules | None = None  # beam search; the best sampling.n answers are returned
    source: Branch | None = None  # the position it branches from; blocks up to there are reused if they still exist
    tenant: str = ""  # the client it runs for; the fair policy shares the device among tenants
    pin: str = ""  # if set: keep the prompt pinned under this name after the request
    images: tuple[PromptImage, ...] = ()  # of the prompt, in the order of their positions
    adapter: str = ""  # the name of its LoRA adapter; empty: none
    pooling: PoolingWork | None = None  # if set: each of its texts is pooled to one vector; nothing is generated
    adapter_digest: str = ""  # content hash of the adapter; set by the engine when it accepts the request
    prefilled: bool = False  # another engine has just computed its prompt: wait for its blocks

    @property
    def cache_root(self) -> str:
        """The root of the prefix cache for this request, made of its salt and its adapter's digest. Requests share
        cached blocks only if their roots are equal. Without an adapter it is the salt."""
        if self.adapter_digest:
            return f"\0{self.adapter_digest}\0{self.cache_salt}"
        return f"\0\0{self.cache_salt}" if self.cache_salt.startswith("\0") else self.cache_salt

    @property
    def key_tokens(self) -> bytes:
        """The int32 bytes that key the blocks of the prompt in the prefix cache."""
        return key_tokens(self.prompt_token_ids, self.images) if self.images else self.prompt_token_ids.tobytes()

    def __post_init__(self) -> None:
        given: object = self.prompt_token_ids  # may be of any type: annotations are not checked at run time
        if not isinstance(given, array) or given.typecode != "i":
            self.prompt_token_ids = pack_tokens(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Branch:
    """A position in a sample of another request: after the first `num_tokens` tokens of its prompt and output."""

    request_id: str
    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Tells the engine to end a request, or only its sample `index`. Idempotent; unknown ids are ignored.

    The serving layer sets `stop_reason` when it finds a stop string: the finish reason is then "stop", not "abort".
    """

    request_id: str
    index: int | None = None
    stop_reason: str | None = None
