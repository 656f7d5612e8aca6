"""The registry of model families, one entry each. Importing it imports no family, so a server can query it without
torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal, NamedTuple

from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.runtime.models.family import Family


# A decoder generates text, an encoder computes embeddings, a classifier is an encoder or a decoder with a head for
# labels. A decoder embedder has no head at all. A draft head drafts for a decoder and is no model by itself.
Kind = Literal["decoder", "encoder", "classifier", "decoder classifier", "decoder embedder", "draft head"]
CLASSIFIERS: tuple[Kind, ...] = ("classifier", "decoder classifier")
DECODERS: tuple[Kind, ...] = ("decoder", "decoder classifier", "decoder embedder")  # texts are requests of an engine


MTP = "-mtp"  # ends the name of an MTP head's family; the rest is that of its target
WITH_MTP = frozenset({  # families whose checkpoints may have such a head: see mtp.py
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "mimo", "ernie4_5_moe",
})  # fmt: skip


class Entry(NamedTuple):
    """Where a family is defined (file and variable in this folder), and which checkpoints belong to it."""

    file: str
    variable: str
    classes: tuple[str, ...]  # `architectures` in config.json
    in_gguf: bool = False  # GGUF files are supported
    gguf_name: str | None = None  # `general.architecture`, if it differs from `model_type`
    kind: Kind = "decoder"
    formats: tuple[str, ...] = ()  # `quant_method`s that only this family supports
    gguf_mixture: bool = False  # GGUF files have another family's name, plus experts
    gguf_sigmoids: bool = False  # likewise, with experts ranked by sigmoids
    by_inputs: bool = False  # matrices are stored transposed: no quantized checkpoints


ENTRIES: dict[str, Entry] = {  # by `model_type` of config.json
    "llama": Entry("decoder", "LLAMA", ("LlamaForCausalLM",), in_gguf=True),
    "mistral": Entry("decoder", "MISTRAL", ("MistralForCausalLM",)),
    "ministral": Entry("mistral", "MINISTRAL", ("MinistralForCausalLM",)),
    "ministral3": Entry("mistral", "MINISTRAL3", ("Ministral3ForCausalLM",)),
    "mistral3": Entry("pixtral", "MISTRAL3", ("Mistral3ForConditionalGeneration",)),
    "llava": Entry("llava", "LLAVA", ("LlavaForConditionalGeneration",)),
    "llava_next": Entry("llava", "LLAVA_NEXT", ("LlavaNextForConditionalGeneration",)),
    "llava_onevision": Entry("llava", "LLAVA_ONEVISION", ("LlavaOnevisionForConditionalGeneration",)),
    "mixtral": Entry("mixture", "MIXTRAL", ("MixtralForCausalLM",), in_gguf=True, gguf_name="llama", gguf_mixture=True),
    "qwen2": Entry("decoder", "QWEN2", ("Qwen2ForCausalLM",), in_gguf=True),
    "mimo": Entry("decoder", "MIMO", ("MiMoForCausalLM",)),
    "qwen2_moe": Entry("mixture", "QWEN2_MOE", ("Qwen2MoeForCausalLM",), in_gguf=True, gguf_name="qwen2moe"),
    "qwen3": Entry("decoder", "QWEN3", ("Qwen3ForCausalLM",), in_gguf=True),
    "qwen3_moe": Entry("mixture", "QWEN3_MOE", ("Qwen3MoeForCausalLM",), in_gguf=True, gguf_name="qwen3moe"),
    "qwen3_next": Entry("qwen3_next", "QWEN3_NEXT", ("Qwen3NextForCausalLM",), in_gguf=True, gguf_name="qwen3next"),
    "qwen3_5_text": Entry(
        "qwen3_next",
        "QWEN3_5",
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        in_gguf=True,
        gguf_name="qwen35",
    ),
    "qwen3_5_moe_text": Entry(
        "qwen3_next",
        "QWEN3_5_MOE",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        in_gguf=True,
        gguf_name="qwen35moe",
    ),
    "granitemoehybrid": Entry(
        "mamba_hybrid", "GRANITEMOEHYBRID", ("GraniteMoeHybridForCausalLM",), in_gguf=True, gguf_name="granitehybrid"
    ),
    "mamba": Entry("mamba", "MAMBA", ("MambaForCausalLM",), in_gguf=True),
    "mamba2": Entry("mamba2", "MAMBA2", ("Mamba2ForCausalLM",), in_gguf=True),
    "falcon_mamba": Entry("mamba", "FALCON_MAMBA", ("FalconMambaForCausalLM",)),
    "jamba": Entry("jamba", "JAMBA", ("JambaForCausalLM",)),
    "bamba": Entry("mamba_hybrid", "BAMBA", ("BambaForCausalLM",)),
    "nemotron_h": Entry("nemotron_h", "NEMOTRON_H", ("NemotronHForCausalLM",), in_gguf=True),
    "falcon_h1": Entry("falcon_h1", "FALCON_H1", ("FalconH1ForCausalLM",), in_gguf=True, gguf_name="falcon-h1"),
    "recurrent_gemma": Entry("recurrent_gemma", "RECURRENT_GEMMA", ("RecurrentGemmaForCausalLM",)),
    "lfm2": Entry("lfm2", "LFM2", ("Lfm2ForCausalLM",), in_gguf=True),
    "lfm2_moe": Entry("lfm2", "LFM2_MOE", ("Lfm2MoeForCausalLM",), in_gguf=True, gguf_name="lfm2moe"),
    "qwen2_vl": Entry("qwen_vl", "QWEN2_VL", ("Qwen2VLForConditionalGeneration",)),
    "qwen2_5_vl": Entry("qwen_vl", "QWEN2_5_VL", ("Qwen2_5_VLForConditionalGeneration",)),
    "qwen3_vl": Entry("qwen3_vl", "QWEN3_VL", ("Qwen3VLForConditionalGeneration",)),
    "qwen3_vl_moe": Entry("qwen3_vl", "QWEN3_VL_MOE", ("Qwen3VLMoeForConditionalGeneration",)),
    "glm4v": Entry("glm4v", "GLM4V", ("Glm4vForConditionalGeneration",)),
    "glm4v_moe": Entry("glm4v", "GLM4V_MOE", ("Glm4vMoeForConditionalGeneration",)),
    "smolvlm": Entry("smolvlm", "SMOLVLM", ("SmolVLMForConditionalGeneration",)),
    "idefics3": Entry("smolvlm", "IDEFICS3", ("Idefics3ForConditionalGeneration",)),
    "internvl": Entry("internvl", "INTERNVL", ("InternVLForConditionalGeneration",)),
    "cohere2_vision": Entry("cohere2_vision", "COHERE2_VISION", ("Cohere2VisionForConditionalGeneration",)),
    "bitnet": Entry("bitnet", "BITNET", ("BitNetForCausalLM",)),
    "granite": Entry("decoder", "GRANITE", ("GraniteForCausalLM",), in_gguf=True),
    "hyperclovax": Entry("hyperclovax", "HYPERCLOVAX", ("HyperCLOVAXForCausalLM",)),
    "minicpm3": Entry("minicpm3", "MINICPM3", ("MiniCPM3ForCausalLM",)),
    "youtu": Entry("minicpm3", "YOUTU", ("YoutuForCausalLM",)),
    "granite_swa": Entry("granite_swa", "GRANITE_SWA", ("GraniteSWAForCausalLM",)),
    "jais2": Entry("layer_normed", "JAIS2", ("Jais2ForCausalLM",)),
    "cwm": Entry("mistral", "CWM", ("CwmForCausalLM",)),
    "nanochat": Entry("nanochat", "NANOCHAT", ("NanoChatForCausalLM",)),
    "smollm3": Entry("plain", "SMOLLM3", ("SmolLM3ForCausalLM",), in_gguf=True),
    "helium": Entry("plain", "HELIUM", ("HeliumForCausalLM",)),
    "apertus": Entry("apertus", "APERTUS", ("ApertusForCausalLM",)),
    "arcee": Entry("layer_normed", "ARCEE", ("ArceeForCausalLM",), in_gguf=True),
    "nemotron": Entry("layer_normed", "NEMOTRON", ("NemotronForCausalLM",), in_gguf=True),
    "stablelm": Entry("layer_normed", "STABLELM", ("StableLmForCausalLM",), in_gguf=True),
    "olmo": Entry("layer_normed", "OLMO", ("OlmoForCausalLM",), in_gguf=True),
    "olmo2": Entry("olmo", "OLMO2", ("Olmo2ForCausalLM",), in_gguf=True),
    "olmo3": Entry("olmo", "OLMO3", ("Olmo3ForCausalLM",)),
    "olmo_hybrid": Entry("olmo_hybrid", "OLMO_HYBRID", ("OlmoHybridForCausalLM",)),
    "exaone4": Entry("olmo", "EXAONE4", ("Exaone4ForCausalLM",), in_gguf=True),
    "glm": Entry("glm", "GLM", ("GlmForCausalLM",)),
    "glm4": Entry("glm", "GLM4", ("Glm4ForCausalLM",), in_gguf=True),
    "cohere": Entry("cohere", "COHERE", ("CohereForCausalLM",), in_gguf=True, gguf_name="command-r"),
    "cohere2": Entry("cohere", "COHERE2", ("Cohere2ForCausalLM",), in_gguf=True),
    "hunyuan_v1_dense": Entry(
        "hunyuan", "HUNYUAN", ("HunYuanDenseV1ForCausalLM",), in_gguf=True, gguf_name="hunyuan-dense"
    ),
    "internlm2": Entry("internlm2", "INTERNLM2", ("InternLM2ForCausalLM",)),
    "seed_oss": Entry("plain", "SEED_OSS", ("SeedOssForCausalLM",), in_gguf=True),
    "ernie4_5": Entry("plain", "ERNIE4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), in_gguf=True),
    "phi3": Entry("phi3", "PHI3", ("Phi3ForCausalLM",), in_gguf=True),
    "gemma": Entry("gemma1", "GEMMA1", ("GemmaForCausalLM",), in_gguf=True),
    "vaultgemma": Entry("gemma1", "VAULTGEMMA", ("VaultGemmaForCausalLM",)),
    "gemma2": Entry("gemma", "GEMMA2", ("Gemma2ForCausalLM",), in_gguf=True),
    "gemma3_text": Entry(
        "gemma", "GEMMA3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), in_gguf=True, gguf_name="gemma3"
    ),
    "gemma3n_text": Entry(
        "gemma3n",
        "GEMMA3N",
        ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        in_gguf=True,
        gguf_name="gemma3n",
    ),
    "gemma4_text": Entry(
        "gemma4", "GEMMA4", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), in_gguf=True, gguf_name="gemma4"
    ),
    "gpt2": Entry("gpt2", "GPT2", ("GPT2LMHeadModel",), in_gguf=True, by_inputs=True),
    "gpt_bigcode": Entry("gpt_bigcode", "GPT_BIGCODE", ("GPTBigCodeForCausalLM",), in_gguf=True, gguf_name="starcoder"),
    "gpt_neo": Entry("gpt_neo", "GPT_NEO", ("GPTNeoForCausalLM",)),
    "gptj": Entry("gptj", "GPTJ", ("GPTJForCausalLM",)),
    "codegen": Entry("codegen", "CODEGEN", ("CodeGenForCausalLM",)),
    "gpt_oss": Entry(
        "gpt_oss", "GPT_OSS", ("GptOssForCausalLM",), in_gguf=True, gguf_name="gpt-oss", formats=("mxfp4",)
    ),
    "opt": Entry("opt", "OPT", ("OPTForCausalLM",)),
    "xglm": Entry("xglm", "XGLM", ("XGLMForCausalLM",)),
    "gpt_neox": Entry("gpt_neox", "GPT_NEOX", ("GPTNeoXForCausalLM",), in_gguf=True, gguf_name="gptneox"),
    "bloom": Entry("bloom", "BLOOM", ("BloomForCausalLM",), in_gguf=True),
    "mpt": Entry("mpt", "MPT", ("MptForCausalLM", "MPTForCausalLM")),
    "dbrx": Entry("dbrx", "DBRX", ("DbrxForCausalLM",)),
    "phi": Entry("phi", "PHI", ("PhiForCausalLM",), in_gguf=True, gguf_name="phi2"),
    "starcoder2": Entry("starcoder2", "STARCODER2", ("Starcoder2ForCausalLM",), in_gguf=True),
    "falcon": Entry("falcon", "FALCON", ("FalconForCausalLM",), in_gguf=True),
    "deepseek_v2": Entry("deepseek", "DEEPSEEK_V2", ("DeepseekV2ForCausalLM",), in_gguf=True, gguf_name="deepseek2"),
    "deepseek_v3": Entry(
        "deepseek",
        "DEEPSEEK_V3",
        ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"),
        in_gguf=True,
        gguf_name="deepseek2",
        gguf_sigmoids=True,
    ),
    "hunyuan_v1_moe": Entry("hunyuan_moe", "HUNYUAN_MOE", ("HunYuanMoEV1ForCausalLM",)),
    "llama4_text": Entry("llama4", "LLAMA4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")),
    "ernie4_5_moe": Entry(
        "ernie_moe", "ERNIE4_5_MOE", ("Ernie4_5_MoeForCausalLM",), in_gguf=True, gguf_name="ernie4_5-moe"
    ),
    "deepseek_v32": Entry("latent_mixture", "DEEPSEEK_V32", ("DeepseekV32ForCausalLM",)),
    "glm4_moe_lite": Entry("latent_mixture", "GLM4_MOE_LITE", ("Glm4MoeLiteForCausalLM",)),
    "glm_moe_dsa": Entry("latent_mixture", "GLM_MOE_DSA", ("GlmMoeDsaForCausalLM",)),
    "mistral4": Entry("latent_mixture", "MISTRAL4", ("Mistral4ForCausalLM",)),
    "glm4_moe": Entry("sigmoid_mixture", "GLM4_MOE", ("Glm4MoeForCausalLM",), in_gguf=True, gguf_name="glm4moe"),
    "minimax_m2": Entry("minimax", "MINIMAX_M2", ("MiniMaxM2ForCausalLM",), in_gguf=True, gguf_name="minimax-m2"),
    "dots1": Entry("sigmoid_mixture", "DOTS1", ("Dots1ForCausalLM",), in_gguf=True),
    "solar_open": Entry("sigmoid_mixture", "SOLAR_OPEN", ("SolarOpenForCausalLM",)),
    "exaone_moe": Entry("sigmoid_mixture", "EXAONE_MOE", ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM")),
    "afmoe": Entry("afmoe", "AFMOE", ("AfmoeForCausalLM",), in_gguf=True),
    "hy_v3": Entry("sigmoid_mixture", "HY_V3", ("HYV3ForCausalLM",)),
    "mellum": Entry("mellum", "MELLUM", ("MellumForCausalLM",)),
    "phimoe": Entry("phimoe", "PHIMOE", ("PhiMoEForCausalLM", "PhimoeForCausalLM")),
    "flex_olmo": Entry("olmoe", "FLEX_OLMO", ("FlexOlmoForCausalLM",)),
    "olmoe": Entry("olmoe", "OLMOE", ("OlmoeForCausalLM",), in_gguf=True),
    "granitemoe": Entry("granite_moe", "GRANITEMOE", ("GraniteMoeForCausalLM",), in_gguf=True),
    "granitemoeshared": Entry("granite_moe", "GRANITEMOESHARED", ("GraniteMoeSharedForCausalLM",)),
    "eagle3": Entry(
        "eagle",
        "EAGLE3",
        ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator"),
        kind="draft head",
    ),
    "llama-classifier": Entry(
        "decoder", "LLAMA_CLASSIFIER", ("LlamaForSequenceClassification",), kind="decoder classifier"
    ),
    "mistral-classifier": Entry(
        "decoder", "MISTRAL_CLASSIFIER", ("MistralForSequenceClassification",), kind="decoder classifier"
    ),
    "qwen2-classifier": Entry(
        "decoder", "QWEN2_CLASSIFIER", ("Qwen2ForSequenceClassification",), kind="decoder classifier"
    ),
    "qwen3-classifier": Entry(
        "decoder", "QWEN3_CLASSIFIER", ("Qwen3ForSequenceClassification",), kind="decoder classifier"
    ),
    "llama-embedder": Entry("decoder", "LLAMA_EMBEDDER", ("LlamaModel",), kind="decoder embedder"),
    "mistral-embedder": Entry("decoder", "MISTRAL_EMBEDDER", ("MistralModel",), kind="decoder embedder"),
    "qwen2-embedder": Entry("decoder", "QWEN2_EMBEDDER", ("Qwen2Model",), kind="decoder embedder"),
    "qwen3-embedder": Entry("decoder", "QWEN3_EMBEDDER", ("Qwen3Model",), kind="decoder embedder"),
    "gemma2-embedder": Entry("gemma", "GEMMA2_EMBEDDER", ("Gemma2Model",), kind="decoder embedder"),
    "bert": Entry("bert", "BERT", ("BertModel", "BertForMaskedLM"), in_gguf=True, kind="encoder"),
    "roberta": Entry("bert", "ROBERTA", ("RobertaModel", "RobertaForMaskedLM"), kind="encoder"),
    "xlm-roberta": Entry("bert", "XLM_ROBERTA", ("XLMRobertaModel", "XLMRobertaForMaskedLM"), kind="encoder"),
    "distilbert": Entry("bert", "DISTILBERT", ("DistilBertModel", "DistilBertForMaskedLM"), kind="encoder"),
    "modernbert": Entry("modern_bert", "MODERN_BERT", ("ModernBertModel", "ModernBertForMaskedLM"), kind="encoder"),
    "embedding_gemma": Entry("embedding_gemma", "EMBEDDING_GEMMA", ("Gemma3TextModel",), kind="encoder"),
    "nomic_bert": Entry(
        "rotary_bert", "NOMIC", ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining"), kind="encoder"
    ),
    "jina_embeddings_v3": Entry(
        "rotary_bert", "JINA3", ("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"), kind="encoder"
    ),
    "camembert": Entry("bert_variants", "CAMEMBERT", ("CamembertModel", "CamembertForMaskedLM"), kind="encoder"),
    "electra": Entry(
        "bert_variants", "ELECTRA", ("ElectraModel", "ElectraForMaskedLM", "ElectraForPreTraining"), kind="encoder"
    ),
    "albert": Entry(
        "bert_variants", "ALBERT", ("AlbertModel", "AlbertForMaskedLM", "AlbertForPreTraining"), kind="encoder"
    ),
    "mpnet": Entry("bert_variants", "MPNET", ("MPNetModel", "MPNetForMaskedLM"), kind="encoder"),
    "bert-classifier": Entry("bert", "BERT_CLASSIFIER", ("BertForSequenceClassification",), kind="classifier"),
    "roberta-classifier": Entry("bert", "ROBERTA_CLASSIFIER", ("RobertaForSequenceClassification",), kind="classifier"),
    "xlm-roberta-classifier": Entry(
        "bert", "XLM_ROBERTA_CLASSIFIER", ("XLMRobertaForSequenceClassification",), kind="classifier"
    ),
    "nomic_bert-classifier": Entry(
        "rotary_bert", "NOMIC_CLASSIFIER", ("NomicBertForSequenceClassification",), kind="classifier"
    ),
    "jina_embeddings_v3-classifier": Entry(
        "rotary_bert", "JINA3_CLASSIFIER", ("JinaEmbeddingsV3ForSequenceClassification",), kind="classifier"
    ),
    "camembert-classifier": Entry(
        "bert_variants", "CAMEMBERT_CLASSIFIER", ("CamembertForSequenceClassification",), kind="classifier"
    ),
    "electra-classifier": Entry(
        "bert_variants", "ELECTRA_CLASSIFIER", ("ElectraForSequenceClassification",), kind="classifier"
    ),
    "albert-classifier": Entry(
        "bert_variants", "ALBERT_CLASSIFIER", ("AlbertForSequenceClassification",), kind="classifier"
    ),
    "mpnet-classifier": Entry(
        "bert_variants", "MPNET_CLASSIFIER", ("MPNetForSequenceClassification",), kind="classifier"
    ),
    "modernbert-classifier": Entry(
        "modern_bert", "MODERN_BERT_CLASSIFIER", ("ModernBertForSequenceClassification",), kind="classifier"
    ),
    "distilbert-classifier": Entry(
        "bert", "DISTILBERT_CLASSIFIER", ("DistilBertForSequenceClassification",), kind="classifier"
    ),
}
CLASSES = {known: name for name, entry in ENTRIES.items() for known in entry.classes}
IN_GGUF, GGUF_MIXTURES, GGUF_SIGMOIDS = (
    {
        entry.gguf_name or name: name
        for name, entry in ENTRIES.items()
        if entry.in_gguf and (entry.gguf_mixture, entry.gguf_sigmoids) == flags
    }
    for flags in ((False, False), (True, False), (False, True))
)


def of_kind(kind: Kind) -> tuple[str, ...]:
    """Return the names of all families of a kind."""
    return tuple(name for name, entry in ENTRIES.items() if entry.kind == kind)


def check_generates(name: str, setting: str = "model") -> None:
    """Raise ConfigError if a family does not generate text. `setting`: the setting that names the model."""
    if ENTRIES[name].kind == "draft head":
        reason = f"is an EAGLE head ({name}): it drafts for another model and generates no text by itself"
        raise ConfigError(setting, reason, "use the model that it belongs to, and name the head in speculative_config")
    if (why := why_silent(name, f" ({name})")) is not None:
        raise ConfigError(setting, why, "use a model that generates text")


def why_silent(name: str, detail: str = "") -> str | None:
    """Return why a family generates no text, with `detail` after what it is, or None if it does."""
    kind = ENTRIES[name].kind
    if kind == "decoder":
        return None
    makes = "gives texts labels or scores" if kind in CLASSIFIERS else "makes embeddings"
    return f"{describe(name)}{detail}: it {makes} and generates no text"


def describe(name: str) -> str:
    """Return what a family is that generates no text."""
    kind = ENTRIES[name].kind
    if kind == "decoder embedder":
        return "is a decoder without output head"
    return "is a classifier" if kind in CLASSIFIERS else "is an encoder"


def check_drafts(name: str) -> None:
    """Raise ConfigError if `speculative_config` cannot name this family: it is neither a decoder nor a draft head."""
    if ENTRIES[name].kind != "draft head":
        check_generates(name, "speculative_config")


def find_family(name: str) -> Family:
    """Import and return a family. Raises ConfigError for a name that is not in ENTRIES."""
    if name.endswith(MTP):
        heads: dict[str, Family] = import_module("quire.runtime.models.mtp").HEADS
        return heads[name]
    if name not in ENTRIES:
        known = ", ".join(sorted(ENTRIES))
        raise ConfigError("architecture", f"{name!r} is not supported", f"supported: {known}")
    entry = ENTRIES[name]
    family: Family = getattr(import_module(f"quire.runtime.models.{entry.file}"), entry.variable)
    return family
