"""Names of tensors in checkpoints of BERT and of families like it."""

from __future__ import annotations

from collections.abc import Mapping

# Replacements from checkpoint names to layer names, applied in this order because some contain others.
BERT_NAMES = {
    "encoder.layer.": "layers.",
    ".attention.self.": ".attention.",
    ".attention.output.dense.": ".attention.output.",
    ".attention.output.LayerNorm.": ".attention_norm.",
    ".intermediate.dense.": ".mlp.up.",
    ".output.dense.": ".mlp.down.",
    ".output.LayerNorm.": ".mlp_norm.",
}
DISTILBERT_NAMES = {
    "transformer.layer.": "layers.",
    ".q_lin.": ".query.",
    ".k_lin.": ".key.",
    ".v_lin.": ".value.",
    ".out_lin.": ".output.",
    ".sa_layer_norm.": ".attention_norm.",
    ".ffn.lin1.": ".mlp.up.",
    ".ffn.lin2.": ".mlp.down.",
    ".output_layer_norm.": ".mlp_norm.",
}
# Names of the head's two layers, by family. Checked before the names above, which contain some of them.
BERT_HEAD = {"pooler.dense.": "head.dense.", "classifier.": "head.out."}
ROBERTA_HEAD = {"classifier.dense.": "head.dense.", "classifier.out_proj.": "head.out."}
DISTILBERT_HEAD = {"pre_classifier.": "head.dense.", "classifier.": "head.out."}
# Ignored: heads that are only used in training, and buffers that are no weights.
LEFT_OUT = (
    "pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids", "embeddings.token_type_ids", "predictions.",
    "sop_classifier.", "generator_", "discriminator_",
)  # fmt: skip


def rename_bert(names: Mapping[str, str], head: Mapping[str, str], prefix: str, name: str) -> str | None:
    """Return the layer's name. Checkpoints with a head have a prefix; old ones name norm parameters gamma and beta."""
    name = name.removeprefix(prefix).replace(".gamma", ".weight").replace(".beta", ".bias")
    for theirs, ours in head.items():
        if name.startswith(theirs):
            return name.replace(theirs, ours)
    if name.startswith(LEFT_OUT):
        return None
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name
