"""Several samples of one prompt. They share the prompt's blocks until they differ; logprobs are raw."""

from quire import LLM, SamplingParams

with LLM() as llm:
    sampling = SamplingParams(n=4, temperature=1.0, top_p=0.95, seed=7, max_tokens=24, logprobs=2)
    (output,) = llm.generate("My favourite place in the world is", sampling)
    for completion in output.outputs:
        print(f"{completion.cumulative_logprob:8.2f}  {completion.text!r}")
    print("\nalternatives for the first token of the first sample:")
    for token_id, entry in (output.outputs[0].logprobs or [])[0].items():
        print(f"{token_id:6d}  rank {entry.rank}  {entry.logprob:.3f}  {entry.decoded_token!r}")
