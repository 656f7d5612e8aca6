"""The table of families and features: `python -m tests.families.matrix`, with the names of families for these alone. A
cell says ok, or why not: a feature that does not apply, or what failed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# In Triton's interpreter, families whose layers run by kernels that another one has too: the table runs them, and the
# suite with QUIRE_TEST_WHOLE or on a GPU.
SAME_KERNELS = {
    "afmoe": "glm4_moe",
    "apertus": "qwen3",
    "arcee": "nemotron",
    "bamba": "granitemoehybrid",
    "bitnet": "nemotron",
    "codegen": "phi",
    "cohere": "cohere2",
    "cwm": "mixtral",
    "dbrx": "mixtral",
    "deepseek_v2": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "dots1": "glm4_moe",
    "ernie4_5": "llama",
    "ernie4_5_moe": "mixtral",
    "exaone4": "gemma3_text",
    "falcon_mamba": "mamba",
    "exaone_moe": "glm4_moe",
    "flex_olmo": "mixtral",
    "gemma": "gemma2",
    "glm": "glm4",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "glm4_moe_lite": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v3",
    "gpt_bigcode": "gpt2",
    "gptj": "phi",
    "granite": "llama",
    "granite_swa": "gpt_oss",
    "hy_v3": "glm4_moe",
    "jais2": "nemotron",
    "mellum": "qwen3_moe",
    "youtu": "deepseek_v3",
    "granitemoe": "mixtral",
    "granitemoeshared": "mixtral",
    "helium": "llama",
    "hyperclovax": "glm4",
    "idefics3": "llama",
    "hunyuan_v1_moe": "hunyuan_v1_dense",
    "internlm2": "llama",
    "internvl": "starcoder2",
    "cohere2_vision": "cohere2",
    "lfm2": "lfm2_moe",
    "mimo": "starcoder2",
    "mamba2": "granitemoehybrid",
    "minicpm3": "deepseek_v3",
    "minimax_m2": "glm4_moe",
    "ministral": "mixtral",
    "mistral": "mixtral",
    "mpt": "bloom",
    "mistral3": "llama",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "starcoder2",
    "mistral4": "deepseek_v3",
    "olmo": "cohere2",
    "olmo3": "olmo2",
    "olmo_hybrid": "qwen3_next",
    "olmoe": "mixtral",
    "phi3": "llama",
    "qwen2": "starcoder2",
    "qwen2_moe": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "seed_oss": "starcoder2",
    "smollm3": "llama",
    "smolvlm": "llama",
    "solar_open": "glm4_moe",
    "vaultgemma": "gemma2",
    "xglm": "opt",
}
# Families of the same blocks as another one: the suite runs these features, the table and QUIRE_TEST_WHOLE all.
SAME_BLOCKS = {
    "cohere": "cohere2",
    "cwm": "mistral",
    "dots1": "glm4_moe",
    "ernie4_5": "llama",
    "exaone_moe": "glm4_moe",
    "gemma": "llama",
    "glm": "glm4",
    "glm4v": "glm4",
    "glm4v_moe": "glm4_moe",
    "glm4_moe_lite": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v32",
    "gpt_bigcode": "gpt2",
    "granitemoeshared": "granitemoe",
    "helium": "llama",
    "idefics3": "llama",
    "hunyuan_v1_moe": "hunyuan_v1_dense",
    "internlm2": "llama",
    "internvl": "qwen2",
    "cohere2_vision": "cohere2",
    "mimo": "qwen2",
    "ministral": "mistral",
    "mistral3": "llama",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral4": "deepseek_v3",
    "seed_oss": "qwen2",
    "smolvlm": "llama",
    "solar_open": "glm4_moe",
}
FEW_FEATURES = ("parity", "CPU program", "fp8")
NOT_YET = {  # (family, feature): why not
    ("deepseek_v32", "graphs"): "the Triton kernels have no indexer",
    ("glm_moe_dsa", "graphs"): "the Triton kernels have no indexer",
}


def chosen(names: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the families to run: those named, or all. Ends the program for a name that no tiny model has."""
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"{', '.join(unknown)}: no such family in tests/support/family_models.py")
    return list(names) or sorted(known)


def main() -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
    import pytest
    import torch

    import interpreter  # noqa: F401  where there is no GPU
    from family_models import CASES, FamilyCase
    from tests.families.features import FEATURES
    from tests.families.table import head_of, row_of, why_failed

    torch.set_num_threads(1)
    families, failed = chosen(sys.argv[1:], CASES), 0
    print(head_of(FEATURES))
    for family in families:
        cells: list[str] = []
        with tempfile.TemporaryDirectory() as directory:
            case = FamilyCase(family, Path(directory))
            for feature, run in FEATURES.items():
                reason = NOT_YET.get((family, feature))
                try:
                    if reason is None:
                        run(case)
                    cells.append(reason or "ok")
                except pytest.skip.Exception as skipped:
                    cells.append(f"not here: {skipped}")
                except Exception as error:  # noqa: BLE001  the table shows what failed
                    failed += 1
                    cells.append(why_failed(error))
        print(row_of(family, cells), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
