"""Random checkpoints that the GPU benchmarks write are what the engine loads."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.models import MODELS, BenchModel
from quire import LLM, SamplingParams

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256, "rope_scaling": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_gpt_oss_is_written_with_experts_in_mxfp4(tmp_path: Path) -> None:
    model = BenchModel({**MODELS["gpt-oss-20b-mxfp4"].config, **SMALL})
    path, settings = model.write(tmp_path), {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
    llm = LLM(path, load_format=model.load_format, **settings)  # type: ignore[arg-type]
    assert llm.model_config.quantization == "mxfp4"
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 3


def test_other_models_make_their_weights_at_load() -> None:
    assert MODELS["gpt-oss-20b"].load_format == "dummy"
