"""Tree search over lines of a solution: good beginnings are forked, bad ones are given up.

A fork shares all blocks with what it branches from: only new lines are computed.
"""

from dataclasses import dataclass

from arithmetic import PROBLEMS, answer_in, prompt_for

from quire import LLM, RequestOutput, SamplingParams

WIDTH = 3  # beginnings that are kept
BRANCHES = 4  # lines that are tried after each
LINES = 6


@dataclass
class Node:
    """A beginning of a solution, and the sum and number of its tokens' logprobs."""

    output: RequestOutput
    index: int
    text: str
    logprob: float
    num_tokens: int

    @property
    def score(self) -> float:
        return self.logprob / max(self.num_tokens, 1)


def one_line(seed: int) -> SamplingParams:
    """The newline belongs to the line, so that the next begins after it."""
    return SamplingParams(
        n=BRANCHES, temperature=0.8, seed=seed, max_tokens=40, stop="\n", include_stop_str_in_output=True, logprobs=0
    )


def children(parent: Node | None, output: RequestOutput) -> list[Node]:
    before = parent or Node(output, 0, "", 0.0, 0)
    return [
        Node(
            output,
            one.index,
            before.text + one.text,
            before.logprob + (one.cumulative_logprob or 0.0),
            before.num_tokens + len(one.token_ids),
        )
        for one in output.outputs
        if one.text.strip()
    ]


def solve(llm: LLM, question: str) -> Node | None:
    """The solved beginning with the likeliest tokens; None if no branch came to an answer."""
    nodes = children(None, llm.start(prompt_for(question), one_line(0)).wait())
    for depth in range(1, LINES):
        nodes = sorted({node.text: node for node in nodes}.values(), key=lambda node: -node.score)[:WIDTH]
        if nodes and answer_in(nodes[0].text) is not None:
            return nodes[0]
        forks = [
            (node, llm.fork(node.output, index=node.index, sampling_params=one_line(depth)))
            for node in nodes
            if answer_in(node.text) is None
        ]
        solved = [node for node in nodes if answer_in(node.text) is not None]
        nodes = solved + [child for node, fork in forks for child in children(node, fork.wait())]
    return max((node for node in nodes if answer_in(node.text) is not None), key=lambda node: node.score, default=None)


with LLM() as llm:
    for question, expected in PROBLEMS.items():
        best = solve(llm, question)
        found = "no answer" if best is None else f"{answer_in(best.text)} ({best.score:.3f} per token)"
        print(f"{question}\n  {found}, expected: {expected}")
    stats = llm.stats()
    print(f"{stats.prefix_hits} of {stats.prefix_queries} prompt tokens were computed before")
