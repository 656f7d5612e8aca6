"""The sampler's contract for one row, written a second time: slow, plain, in float64 and Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.types.step import NewRow

MASK = 2**64 - 1


def transformed(logits: Sequence[float], new: NewRow) -> list[float]:
    """Logits after everything but top_k and top_p, in vLLM V1's order."""
    params, scores = new.sampling, [float(x) for x in logits]
    known = [int(token) for token in new.token_ids]
    output = known[new.num_prompt_tokens :]

    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        scores = [x if i in allowed else -math.inf for i, x in enumerate(scores)]
    for *prefix, last in new.rules.bad_words:
        if not prefix or output[-len(prefix) :] == prefix:
            scores[last] = -math.inf
    if len(output) < params.min_tokens:
        for token in new.rules.end_ids:
            scores[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in set(known):
        x, r = scores[token], params.repetition_penalty
        scores[token] = x / r if x > 0 else x * r
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature == 0:
        return scores
    scores = [x / params.temperature for x in scores]
    if params.min_p > 0:
        cut = max(scores) + math.log(params.min_p)
        scores = [x if x >= cut else -math.inf for x in scores]
    return scores


def ranked(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def candidates(scores: Sequence[float], top_k: int, top_p: float) -> list[tuple[int, float]]:
    """The tokens that may be drawn, in the order in which the cumulative distribution runs, with probabilities."""
    best = max(scores)
    weights = [math.exp(x - best) for x in scores]
    order = list(range(len(scores))) if top_k == 0 and top_p == 1.0 else ranked(scores)
    if top_k:
        order = order[:top_k]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for token in order:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    return [(token, weights[token] / mass) for token in kept if weights[token] > 0]


def uniform(seed: int, sample_index: int, num_outputs: int) -> float:
    gamma = 0x9E3779B97F4A7C15
    start = mix((mix((seed + gamma) & MASK) ^ (sample_index * gamma)) & MASK)
    return ((mix((start + (num_outputs + 1) * gamma) & MASK) >> 12) + 0.5) / 2**52


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def acceptable_tokens(logits: Sequence[float], new: NewRow, slack: float = 1e-5) -> set[int]:
    """The token to draw; also its neighbours if the random number lies within `slack` of a border between two."""
    scores = transformed(logits, new)
    if new.sampling.is_greedy:
        best = max(scores)
        return {i for i, x in enumerate(scores) if x >= best - slack}
    u = uniform(new.seed, new.sample_index, len(new.token_ids) - new.num_prompt_tokens)
    found, before = set(), 0.0
    for token, probability in candidates(scores, new.sampling.top_k, new.sampling.top_p):
        if before - slack <= u <= before + probability + slack:
            found.add(token)
        before += probability
    return found
