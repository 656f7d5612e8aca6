"""Self-consistency: many solutions of one problem are sampled together, and the most frequent answer counts.

All samples share the blocks of the prompt. As soon as no other answer can win any more, the rest are ended.
"""

from collections import Counter

from arithmetic import PROBLEMS, answer_in, prompt_for

from quire import LLM, LiveRequest, SamplingParams

SAMPLES = 12
SAMPLING = SamplingParams(n=SAMPLES, temperature=0.7, seed=1, max_tokens=100, stop="\n\n")


def votes_so_far(live: LiveRequest) -> Counter[int]:
    """The answers of samples that have come to one; the number must be over."""
    texts = [live.text(index) for index in range(SAMPLES)]
    answers = [answer_in(text) for text in texts if "\n" in text.partition("Answer:")[2] or live.is_finished]
    return Counter(answer for answer in answers if answer is not None)


def is_decided(votes: Counter[int], num_open: int) -> bool:
    """Whether the votes still to come cannot change who leads."""
    (first, *rest) = [*(count for _, count in votes.most_common(2)), 0]
    return first > rest[0] + num_open


with LLM() as llm:
    for question, expected in PROBLEMS.items():
        live = llm.start(prompt_for(question), SAMPLING)
        while not live.is_finished:
            llm.step()
            votes = votes_so_far(live)
            if votes and is_decided(votes, SAMPLES - votes.total()):
                live.cancel()
        votes = votes_so_far(live)
        print(f"{question}\n  votes: {dict(votes)}, expected: {expected}")
    print(llm.stats())
