"""Random requests of every kind for the engine's fuzz, each with the answer that it must get."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fuzz_grammars import REAL_GRAMMARS, real_answer
from quire.types.decoding import BeamRules
from toy_decoding import BeamQuestion, beam_answers, grammar_answer, letter
from toy_model import VOCAB, continuation, logprob

END_IDS = (3, 50)
STEM = list(range(7, 22))
TALE = [(11 * place) % VOCAB for place in range(300)]
FAILING_GRAMMARS = ("bad", "bad after a while", "tired")  # to be compiled, or to be followed


@dataclass
class Asked:
    """One request of a mix, and what must come of it."""

    prompt: list[int]
    seed: int
    length: int
    params: dict[str, object] = field(default_factory=dict)
    salt: str = ""
    adapter: str = ""
    tokens: Callable[[int], list[int]] = lambda index: []  # of each sample
    ranked: list[tuple[int, ...]] | None = None  # the samples' tokens, best first
    may_fail: bool = False  # by its own grammar

    @property
    def num_sequences(self) -> int:
        beam = self.params.get("beam")
        return beam.width if isinstance(beam, BeamRules) else int(str(self.params.get("best_of", self.params["n"])))

    @property
    def grammar(self) -> str:
        return str(self.params.get("grammar", ""))


@dataclass(frozen=True)
class Crowd:
    """What the requests of a mix are like."""

    num_slots: int  # tokens that the cache has room for
    grows: bool = False  # short prompts and longer answers, which make room for each other
    is_guided: bool = False  # most have a real grammar
    is_single: bool = False  # of one sequence each
    period: int = 0  # the pretend model repeats what stands so many tokens before; 0: it does not


def ask(rng: random.Random, number: int, crowd: Crowd) -> Asked:
    """A request that fits into the cache, if that is soon found."""
    for _ in range(6):
        asked = _ask(rng, number, crowd)
        if asked.num_sequences * (len(asked.prompt) % 8 + asked.length) + len(asked.prompt) <= crowd.num_slots and (
            asked.num_sequences == 1 or not crowd.is_single
        ):
            break
    return asked


def _ask(rng: random.Random, number: int, crowd: Crowd) -> Asked:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))]
    seed = rng.choice([number % 100, 100 + number])  # from 100 on there are toy drafts
    asked = Asked(prompt, seed, rng.randint(1, 14))
    kind = rng.random()
    if crowd.period:
        asked.prompt, asked.length = [*prompt, *TALE[: crowd.period]], rng.randint(1, 30)
        echo(rng, asked, crowd.period)
    elif crowd.grows:
        asked.prompt, asked.length = rng.choice([prompt[:1], prompt]), rng.randint(6, 16)
        plain(rng, asked)
    elif crowd.is_guided and kind < 0.8:
        asked.seed, asked.length = rng.choice([number % 100, seed]), rng.randint(3, 14)
        _guided(rng, asked)
    elif kind < 0.12:  # it takes the cache alone, or nearly so, and begins like others of its kind
        length = max(crowd.num_slots - rng.choice([0, 1, 2, 9, crowd.num_slots // 2]), 2)
        asked.prompt, asked.length = [*TALE[: length - rng.choice([1, 2, 5])], *prompt][:length], rng.choice([1, 1, 4])
        plain(rng, asked)
    else:
        if kind < 0.4:
            asked.prompt = STEM[: rng.randint(1, len(STEM))] + prompt[:3]  # some begin alike
        elif kind < 0.5:
            asked.prompt = prompt[:1]
        rng.choice([plain, plain, _constrained, _guided, _best_of, _beams])(rng, asked)
    return asked


def plain(rng: random.Random, asked: Asked) -> None:
    prompt_logprobs = 0 if rng.random() < 0.05 else None  # every token of its prompt is computed
    asked.params = {"n": rng.randint(1, 3), "logprobs": rng.choice([None, 0]), "prompt_logprobs": prompt_logprobs}
    asked.tokens = lambda index: continuation(asked.prompt, asked.length, seed=asked.seed, index=index, end_ids=END_IDS)


def echo(rng: random.Random, asked: Asked, period: int) -> None:
    """What the pretend model says when it repeats itself."""
    asked.params = {"n": rng.randint(1, 3)}

    def tokens(index: int) -> list[int]:  # all samples are alike
        history, start = list(asked.prompt), len(asked.prompt)
        while len(history) - start < asked.length:
            history.append(history[-period])
            if history[-1] in END_IDS:
                break
        return history[start:]

    asked.tokens = tokens


def _constrained(rng: random.Random, asked: Asked) -> None:
    asked.params = {"n": rng.randint(1, 3)}
    asked.may_fail = rng.random() < 0.1
    toys = [sign * times for sign in "abcdefg" for times in (1, 2, 4, 9)]
    constrain(asked, rng.choice(FAILING_GRAMMARS if asked.may_fail else toys))


def constrain(asked: Asked, grammar: str) -> None:
    """Have it follow a toy grammar."""
    asked.params["grammar"] = grammar
    asked.tokens = lambda index: grammar_answer(
        asked.prompt, asked.length, grammar, seed=asked.seed, index=index, end_ids=END_IDS
    )


def _guided(rng: random.Random, asked: Asked) -> None:
    """A real grammar. Without drafts, its sequences are guided."""
    grammar = rng.choice(REAL_GRAMMARS)
    asked.params = {"n": rng.choice([1, 1, 1, 2, 3]), "grammar": grammar}
    asked.tokens = lambda index: real_answer(
        asked.prompt, asked.length, grammar, seed=asked.seed, index=index, end_ids=END_IDS
    )


def _best_of(rng: random.Random, asked: Asked) -> None:
    count, rank_by, stop = rng.randint(2, 4), rng.choice(["mean", "sum"]), rng.choice(["", "", "e"])
    n = rng.randint(1, count - 1)
    plain(rng, asked)
    if rng.random() < 0.3:
        constrain(asked, rng.choice("abc"))
    asked.params = {
        **asked.params,
        "n": n,
        "best_of": count,
        "rank_by": rank_by,
        "stop": stop or None,
        "logprobs": None,
    }
    found = []
    for index in range(count):
        tokens = asked.tokens(index)
        if stop:
            ends = [place for place, token in enumerate(tokens, 1) if letter(token) == stop and token not in END_IDS]
            tokens = tokens[: ends[0]] if ends else tokens
        history = [*asked.prompt, *tokens]
        first = len(asked.prompt)
        total = sum(logprob(history[: first + place], token) for place, token in enumerate(tokens))
        found.append((total / len(tokens) if rank_by == "mean" else total, tuple(tokens)))
    asked.ranked = [tokens for _, tokens in sorted(found, key=lambda one: -one[0])][:n]


def _beams(rng: random.Random, asked: Asked) -> None:
    rules = BeamRules(
        rng.randint(1, 5),
        rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
        rng.choice([True, False, "never"]),
        rng.random() < 0.3,
    )
    grammar, stop = rng.choice(["", "", "h", "ii"]), rng.choice(["", "", "ab", "q"])
    n = rng.randint(1, rules.width)
    asked.params = {"n": n, "beam": rules, "grammar": grammar, "stop": stop or None}
    question = BeamQuestion(tuple(asked.prompt), rules, asked.length, END_IDS, grammar, stop)
    asked.ranked = [answer.tokens for answer in beam_answers(question)][:n]
