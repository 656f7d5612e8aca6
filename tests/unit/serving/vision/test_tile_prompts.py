"""SmolVLM offline: the chat template writes one token for a picture, and the prompt has its tiles and the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.types.errors import InvalidRequest
from tiny_served import _write_tokenizer

Image = pytest.importorskip("PIL.Image")
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3))
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def write_smolvlm(folder: Path) -> Path:
    backend = _write_tokenizer(folder, "<end>", "<image>", AROUND, WHOLE, *TILES)
    text = {
        "model_type": "llama", "vocab_size": backend.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 16,
    }  # fmt: skip
    config = {
        "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "text_config": text,
        "vision_config": vision, "torch_dtype": "float32", "image_token_id": backend.token_to_id("<image>"),
        "scale_factor": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    prepared = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}, "resample": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(prepared))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_picture_becomes_its_tiles_and_the_whole(tmp_path: Path) -> None:
    image = Image.linear_gradient("L").resize((45, 30)).convert("RGB")
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "what?"}]
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "num_kv_blocks": 64}
    with LLM(write_smolvlm(tmp_path), limit_mm_per_prompt={"image": 1}, **settings) as made:
        (chat,) = made.chat([{"role": "user", "content": parts}], GREEDY)
        given: Any = {"prompt": "<image>what?", "multi_modal_data": {"image": image}}
        (plain,) = made.generate(given, GREEDY)
        shown = "<image>" * 4
        lines = ["".join(f"{AROUND}{tile}{shown}" for tile in TILES[begin : begin + 3]) + "\n" for begin in (0, 3)]
        wanted = made.tokenizer.encode("".join(lines) + f"\n{AROUND}{WHOLE}{shown}{AROUND}what?", False)
        with pytest.raises(InvalidRequest, match="has 2 placeholders of images, and 1 images"):
            made.generate({"prompt": "<image><image>", "multi_modal_data": {"image": image}}, GREEDY)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="one image more than the 1"):
            made.chat([{"role": "user", "content": parts[:1] * 2}], GREEDY)
        pair: Any = {"prompt": "<image><image>", "multi_modal_data": {"image": [image.resize((48, 16))] * 2}}
        with pytest.raises(InvalidRequest, match="one image more than the 1"):
            made.generate(pair, GREEDY)  # although both together have fewer tiles than the largest picture
        (again,) = made.generate(given, GREEDY)
    assert list(plain.prompt_token_ids or ()) == list(chat.prompt_token_ids or ()) == list(wanted)
    assert plain.outputs[0].token_ids == chat.outputs[0].token_ids == again.outputs[0].token_ids
