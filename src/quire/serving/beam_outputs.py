"""From outputs to what a beam search returns."""

from __future__ import annotations

from quire.serving.text.tokenizer import Tokenizer
from quire.types.beam import BeamSearchOutput, BeamSearchSequence
from quire.types.output import CompletionOutput, RequestOutput


def beam_output(output: RequestOutput, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """`output` is that of a request with beams. Without a tokenizer texts are empty."""
    sequences = [_sequence(output, one, tokenizer) for one in output.outputs]
    return BeamSearchOutput(sequences, output.request_id, output.prompt_token_ids)


def _sequence(output: RequestOutput, found: CompletionOutput, tokenizer: Tokenizer | None) -> BeamSearchSequence:
    tokens = [*output.prompt_token_ids, *found.token_ids]
    skips = output.sampling is None or output.sampling.skip_special_tokens
    return BeamSearchSequence(
        tokens=tokens,
        text="" if tokenizer is None else tokenizer.decode(tokens, skips),
        cum_logprob=float("nan") if found.cumulative_logprob is None else found.cumulative_logprob,
        score=float("nan") if found.score is None else found.score,
        output_token_ids=found.token_ids,
        output_text=found.text,
        finish_reason=found.finish_reason,
        stop_reason=found.stop_reason,
    )
