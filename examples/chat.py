"""Two conversations at once, and one streamed."""

from quire import LLM, SamplingParams

with LLM() as llm:
    conversations = [
        [{"role": "user", "content": "Name three rivers in Europe."}],
        [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What do bees make?"}],
    ]
    for output in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64)):
        print(output.outputs[0].text, end="\n---\n")

    for piece in llm.stream_chat(conversations[0], SamplingParams(temperature=0.2, seed=0, max_tokens=64)):
        print(piece.text, end="", flush=True)
    print()
