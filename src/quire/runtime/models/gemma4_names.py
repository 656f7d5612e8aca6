"""Where the tensors of Gemma 4's checkpoints belong in our model."""

from __future__ import annotations

from quire.runtime.layers.expert_layers import SIDE_NORMS
from quire.runtime.models.family import text_model_name, with_module_path

# Modules of our model, and the prefixes of layers in them that checkpoints store one level higher.
PLACES = {
    "side_inputs": ("embed_tokens_per_layer.", "per_layer_model_projection.", "per_layer_projection_norm."),
    "side_input": ("per_layer_input_gate.", "per_layer_projection.", "post_per_layer_input_norm."),
    "side_experts": ("router.", "experts.", *(f"{norm}." for norm in SIDE_NORMS)),
}


def rename(name: str) -> str | None:
    """Ignore the tower for sound."""
    outer = name.removeprefix("model.")
    if outer.startswith(("vision_tower.", "embed_vision.")):
        return f"vision_tower.{outer.partition('.')[2]}"
    found = text_model_name(name, ("audio_tower.", "embed_audio."))
    return None if found is None else with_module_path(found, PLACES)
