"""The parameters and results of beam search. Their names are those of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from quire.types.decoding import BeamRules, EarlyStopping, StructuredOutputsParams
from quire.types.errors import InvalidRequest
from quire.types.output import FinishReason
from quire.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of a beam search. Frozen and fully validated when made; unknown arguments raise InvalidRequest.

    `length_penalty` and `early_stopping` mean what they mean in transformers; all other fields mean what they mean in
    SamplingParams.
    """

    beam_width: int
    max_tokens: int | None = 16  # None: up to max_model_len
    _: KW_ONLY
    n: int | None = None  # number of answers to return, best first; None: beam_width
    temperature: float = 0.0  # must be 0: beams are not sampled
    length_penalty: float = 1.0  # answers are ranked by summed logprob / (generated tokens ** length_penalty)
    early_stopping: EarlyStopping = False
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: Iterable[str] | None = ()
    allowed_token_ids: Iterable[int] | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        width = self.rules.width  # raises if beam_width is invalid
        if self.temperature != 0:
            raise InvalidRequest("temperature", f"must be 0, got {self.temperature!r}", "beams are not sampled")
        if self.sampling.n > width:
            raise InvalidRequest("n", f"is {self.n}, above beam_width={width}", "raise beam_width or lower n")

    @property
    def rules(self) -> BeamRules:
        return BeamRules(self.beam_width, self.length_penalty, self.early_stopping)

    @property
    def sampling(self) -> SamplingParams:
        """The parameters that beam search shares with sampling, as SamplingParams."""
        return SamplingParams(
            n=self.beam_width if self.n is None else self.n,
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            logit_bias=self.logit_bias,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=self.structured_outputs,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search. `tokens` and `text` include the prompt, as in vLLM."""

    tokens: list[int]
    text: str
    cum_logprob: float  # sum over the generated tokens
    score: float  # cum_logprob / (number of generated tokens ** length_penalty)
    output_token_ids: list[int]  # without the prompt
    output_text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float:
        return self.cum_logprob


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers of a beam search to one prompt, best first."""

    sequences: list[BeamSearchSequence]
    request_id: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
