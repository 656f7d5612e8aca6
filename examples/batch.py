"""Many prompts in one call, each with its own sampling: the engine batches them continuously."""

from quire import LLM, SamplingParams

PROMPTS = {
    "The capital of France is": SamplingParams(temperature=0, max_tokens=12),
    "Three colours: red,": SamplingParams(temperature=0.8, seed=1, max_tokens=12),
    "def factorial(n):": SamplingParams(temperature=0, max_tokens=48, stop="\n\n"),
}

with LLM() as llm:
    for output in llm.generate(list(PROMPTS), list(PROMPTS.values())):
        completion = output.outputs[0]
        print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")
    print(llm.stats())
