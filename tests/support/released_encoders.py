"""The settings of released encoders and rerankers, as their config.json spells them."""

from __future__ import annotations

from typing import Any

from released_dense import Settings


def bert(name: str, hidden: int, inner: int, layers: int, heads: int, vocab: int = 30522, **others: Any) -> Settings:
    return {
        "architectures": [name], "attention_probs_dropout_prob": 0.1, "classifier_dropout": None,
        "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": hidden,
        "initializer_range": 0.02, "intermediate_size": inner, "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": heads,
        "num_hidden_layers": layers, "pad_token_id": 0, "position_embedding_type": "absolute",
        "torch_dtype": "float32", "type_vocab_size": 2, "use_cache": True, "vocab_size": vocab,
    } | others  # fmt: skip


def roberta(kind: str, name: str, hidden: int, inner: int, layers: int, heads: int, **others: Any) -> Settings:
    usual = {"bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
             "model_type": kind, "output_past": True, "pad_token_id": 1, "type_vocab_size": 1}  # fmt: skip
    return bert(name, hidden, inner, layers, heads, **usual | others)


def modern_bert(name: str, hidden: int, inner: int, layers: int, heads: int, **others: Any) -> Settings:
    return {
        "architectures": [name], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281,
        "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
        "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "hidden_activation": "gelu", "hidden_size": hidden, "initializer_cutoff_factor": 2.0,
        "intermediate_size": inner, "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
        "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": heads, "num_hidden_layers": layers,
        "pad_token_id": 50283, "position_embedding_type": "absolute", "sep_token_id": 50282, "vocab_size": 50368,
        "torch_dtype": "float32",
    } | others  # fmt: skip


def without_types(*given: Any, **others: Any) -> Settings:
    return {key: value for key, value in bert(*given, **others).items() if key != "type_vocab_size"}


XLM, ONE_LABEL = "xlm-roberta", {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
ENCODERS: dict[str, Settings] = {
    "bert-base-uncased": bert("BertForMaskedLM", 768, 3072, 12, 12),
    "all-MiniLM-L6-v2": bert("BertModel", 384, 1536, 6, 12, _name_or_path="nreimers/MiniLM-L6-H384-uncased"),
    "bge-small-en-v1.5": bert("BertModel", 384, 1536, 12, 12, **ONE_LABEL),
    "e5-large-v2": bert("BertModel", 1024, 4096, 24, 16),
    "bge-m3": roberta(XLM, "XLMRobertaModel", 1024, 4096, 24, 16, vocab=250002, max_position_embeddings=8194),
    "multilingual-e5-small": bert("BertModel", 384, 1536, 12, 12, vocab=250037, tokenizer_class="XLMRobertaTokenizer"),
    "roberta-base": roberta("roberta", "RobertaForMaskedLM", 768, 3072, 12, 12, vocab=50265),
    "xlm-roberta-base": roberta(XLM, "XLMRobertaForMaskedLM", 768, 3072, 12, 12, vocab=250002),
    "bge-reranker-v2-m3": roberta(XLM, "XLMRobertaForSequenceClassification", 1024, 4096, 24, 16, vocab=250002,
                                  max_position_embeddings=8194, **ONE_LABEL),
    "ms-marco-MiniLM-L6-v2": bert("BertForSequenceClassification", 384, 1536, 6, 12, **ONE_LABEL,
                                  sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity",
                                                         "version": "4.1.0.dev0"}),
    "ModernBERT-large": modern_bert("ModernBertForMaskedLM", 1024, 2624, 28, 16),
    "gte-modernbert-base": modern_bert("ModernBertModel", 768, 1152, 22, 12, torch_dtype="float16"),
    "gte-reranker-modernbert-base": modern_bert("ModernBertForSequenceClassification", 768, 1152, 22, 12, **ONE_LABEL),
    "embeddinggemma-300m": {
        "architectures": ["Gemma3TextModel"], "attention_bias": False, "attn_logit_softcapping": None,
        "bos_token_id": 2, "dtype": "float32", "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 1152,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 4, "max_position_embeddings": 2048,
        "model_type": "gemma3_text", "num_attention_heads": 3, "num_hidden_layers": 24, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": True, "vocab_size": 262144},
    "nomic-embed-text-v1.5": {
        "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0, "bos_token_id": None,
        "causal": False, "dense_seq_output": True, "embd_pdrop": 0.0, "eos_token_id": None, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
        "model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192,
        "pad_vocab_size_multiple": 64, "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
        "qkv_proj_bias": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2, "use_cache": True,
        "use_rms_norm": False, "vocab_size": 30528, "torch_dtype": "float32"},
    "jina-embeddings-v3-hf": bert("JinaEmbeddingsV3Model", 1024, 4096, 24, 16, 250002, model_type="jina_embeddings_v3",
                                  type_vocab_size=1, max_position_embeddings=8194, pad_token_id=1, layer_norm_eps=1e-5,
                                  rope_parameters={"rope_theta": 20000.0, "rope_type": "default"}),
    "all-mpnet-base-v2": without_types("MPNetForMaskedLM", 768, 3072, 12, 12, 30527, model_type="mpnet", pad_token_id=1,
                              max_position_embeddings=514, relative_attention_num_buckets=32, layer_norm_eps=1e-5),
    "camembert-base": roberta("camembert", "CamembertForMaskedLM", 768, 3072, 12, 12, vocab=32005),
    "electra-small-discriminator": bert("ElectraForPreTraining", 256, 1024, 12, 4, model_type="electra",
                                        embedding_size=128, summary_activation="gelu", summary_use_proj=True),
    "electra-base-discriminator": bert("ElectraForPreTraining", 768, 3072, 12, 12, model_type="electra",
                                       embedding_size=768),
    "paraphrase-albert-small-v2": bert("AlbertModel", 768, 3072, 6, 12, 30000, model_type="albert", down_scale_factor=1,
                                       embedding_size=128, gap_size=0, hidden_act="gelu", inner_group_num=1,
                                       net_structure_type=0, num_hidden_groups=1, num_memory_blocks=0),
    "distilbert-sst-2": {
        "activation": "gelu", "architectures": ["DistilBertForSequenceClassification"], "attention_dropout": 0.1,
        "dim": 768, "dropout": 0.1, "finetuning_task": "sst-2", "hidden_dim": 3072, "model_type": "distilbert",
        "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "initializer_range": 0.02, "max_position_embeddings": 512,
        "label2id": {"NEGATIVE": 0, "POSITIVE": 1}, "n_heads": 12, "n_layers": 6, "output_past": True,
        "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False,
        "tie_weights_": True, "vocab_size": 30522},
}  # fmt: skip
