"""The extra samplers for one row by their definitions: slow, plain, in float64 and Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.types.extra_samplers import ExtraSamplers

INFINITY = math.inf


def probabilities(scores: Sequence[float]) -> list[float]:
    best = max(scores)
    weights = [math.exp(x - best) for x in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def entropy(probs: Sequence[float]) -> float:
    return -sum(p * math.log(p) for p in probs if p > 0)


def repetition_before(context: Sequence[int], place: int, breakers: Sequence[int]) -> int:
    """How many tokens before `place` equal the last ones of the context, without a breaker among them."""
    count = 0
    while count < place and context[place - 1 - count] == context[-1 - count] not in breakers:
        count += 1
    return count


def dry(scores: Sequence[float], context: Sequence[int], extra: ExtraSamplers, breakers: Sequence[int]) -> list[float]:
    if not extra.uses_dry:
        return list(scores)
    if extra.dry_penalty_last_n > 0:
        context = context[-extra.dry_penalty_last_n :]
    changed = list(scores)
    for token in set(context):
        lengths = [
            repetition_before(context, place, breakers) for place in range(1, len(context)) if context[place] == token
        ]
        longest = max(lengths, default=0)
        if longest >= extra.dry_allowed_length:
            changed[token] -= extra.dry_multiplier * extra.dry_base ** (longest - extra.dry_allowed_length)
    return changed


def no_repeats(scores: Sequence[float], context: Sequence[int], size: int) -> list[float]:
    if not size:
        return list(scores)
    grams = {tuple(context[place : place + size]) for place in range(len(context) - size + 1)}
    last = tuple(context[len(context) - size + 1 :])
    return [-INFINITY if len(last) == size - 1 and (*last, token) in grams else x for token, x in enumerate(scores)]


def top_n_sigma(scores: Sequence[float], sigmas: float) -> list[float]:
    if sigmas <= 0:
        return list(scores)
    finite = [x for x in scores if x > -INFINITY]
    mean = sum(finite) / len(finite)
    spread = math.sqrt(sum((x - mean) ** 2 for x in finite) / len(finite))
    return [x if x >= max(finite) - sigmas * spread else -INFINITY for x in scores]


def top_a(scores: Sequence[float], factor: float) -> list[float]:
    probs = probabilities(scores)
    return [x if p >= factor * max(probs) ** 2 else -INFINITY for x, p in zip(scores, probs, strict=True)]


def typical(scores: Sequence[float], mass: float) -> list[float]:
    if mass >= 1.0:
        return list(scores)
    probs = probabilities(scores)
    level = entropy(probs)
    distances = [abs(-math.log(p) - level) if p > 0 else INFINITY for p in probs]
    order = sorted(range(len(scores)), key=distances.__getitem__)
    reached, last = 0.0, order[-1]
    for token in order:
        reached += probs[token]
        if reached >= mass:
            last = token
            break
    return [x if distances[token] <= distances[last] else -INFINITY for token, x in enumerate(scores)]


def xtc(scores: Sequence[float], extra: ExtraSamplers, uniform: float) -> list[float]:
    if uniform >= extra.xtc_probability or extra.xtc_threshold > 0.5:
        return list(scores)
    probs = probabilities(scores)
    top = [token for token, p in enumerate(probs) if p >= extra.xtc_threshold and scores[token] > -INFINITY]
    if len(top) < 2:
        return list(scores)
    kept = min(top, key=lambda token: (probs[token], -token))
    return [-INFINITY if token in top and token != kept else x for token, x in enumerate(scores)]


def dynamic_temperature(scores: Sequence[float], temperature: float, extra: ExtraSamplers) -> float:
    """The temperature that a row has."""
    count = sum(x > -INFINITY for x in scores)
    if extra.dynatemp_range <= 0 or count < 2:
        return temperature
    share = entropy(probabilities(scores)) / math.log(count)
    low, high = max(0.0, temperature - extra.dynatemp_range), temperature + extra.dynatemp_range
    return max(low + (high - low) * min(max(share, 0.0), 1.0) ** extra.dynatemp_exponent, 1e-20)
