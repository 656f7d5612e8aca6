"""Images through the offline API, as vLLM's users type them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.types.errors import ConfigError, InvalidRequest, QuireError
from tiny_served import write_tiny_model, write_tiny_vision_model

Image = pytest.importorskip("PIL.Image")
SETTINGS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "num_kv_blocks": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
HOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_vision_model(tmp_path_factory.mktemp("vision"))
    picture(1).save(folder / "one.png")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, allowed_local_media_path=str(folder), limit_mm_per_prompt={"image": 2}, **SETTINGS) as made:
        yield made


def picture(seed: int, width: int = 40, height: int = 24) -> Any:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def url(image: Any) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def shown(words: str, *images: Any) -> Any:
    """A prompt as vLLM takes it."""
    return {"prompt": words, "multi_modal_data": {"image": list(images) if len(images) > 1 else images[0]}}


def test_without_images_the_model_has_no_tower(folder: Path) -> None:
    with LLM(folder, limit_mm_per_prompt={"image": 0}, **SETTINGS) as made:
        (output,) = made.generate("What?", GREEDY)
        assert len(output.outputs[0].token_ids) == 6
        with pytest.raises(InvalidRequest, match="image"):
            made.chat(user({"type": "image_pil", "image_pil": picture(1)}, text("what?")), GREEDY)
    with pytest.raises(ConfigError, match="about images, and this model takes none"):
        LLM(folder, limit_mm_per_prompt={"image": 0}, mm_processor_kwargs={"max_pixels": 4_096}, **SETTINGS)


def test_all_forms_of_an_image_give_the_same_answer(llm: LLM, folder: Path) -> None:
    image = picture(1)
    prompt = f"<|start|>user\n{HOLDER}what?<|stop|>\n<|start|>assistant\n"
    forms = [
        {"type": "image_url", "image_url": {"url": url(image)}},
        {"type": "image_url", "image_url": url(image)},
        {"type": "input_image", "image_url": f"file://{folder}/one.png"},
        {"type": "image_pil", "image_pil": image},
    ]
    (wanted,) = llm.generate(shown(prompt, image), GREEDY)
    assert len(wanted.prompt_token_ids) == len(llm.tokenizer.encode(prompt, False)) + 15 - 1  # 3 x 5 tokens of it
    found = llm.chat([user(form, text("what?")) for form in forms], GREEDY)
    assert [output.prompt_token_ids for output in found] == [wanted.prompt_token_ids] * 4
    assert tokens(found) == tokens([wanted]) * 4
    assert all((output.num_cached_tokens or 0) > 15 for output in found)


def test_another_image_gives_another_answer(llm: LLM) -> None:
    prompts = [shown(f"{HOLDER}say", picture(seed)) for seed in range(6)]
    found = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, logprobs=1))
    likely = {next(iter(output.outputs[0].logprobs[0].values())).logprob for output in found}  # type: ignore[index]
    assert len(likely) == 6
    (plain,) = llm.generate("say", GREEDY)
    assert len(plain.prompt_token_ids) == 3


def test_several_images_stand_in_their_order(llm: LLM) -> None:
    (both,) = llm.generate(shown(f"{HOLDER}and{HOLDER}", picture(1), picture(2, 16, 16)), GREEDY)
    assert len(both.prompt_token_ids) == 2 + 15 + len("and") + 2 + 4


def test_streams_branches_and_resident_prompts_take_images(llm: LLM) -> None:
    prompt = shown(f"{HOLDER}tell", picture(3))
    (wanted,) = llm.generate(prompt, GREEDY)
    assert [token for piece in llm.stream(prompt, GREEDY) for token in piece.token_ids] == tokens([wanted])[0]
    live = llm.start(prompt, GREEDY)
    llm.step()
    branch = llm.fork(live, 1, sampling_params=SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert list(branch.wait().outputs[0].token_ids) == tokens([wanted])[0][1:]
    live.wait()
    with pytest.raises(InvalidRequest, match="placeholders of images"):
        llm.fork(wanted, 1)
    assert llm.register_prefix("picture", prompt).num_tokens == len(wanted.prompt_token_ids)
    llm.remove_prefix("picture")


REFUSED = [
    (lambda llm: llm.generate(shown("no", picture(1))), "0 placeholders"),
    (lambda llm: llm.generate(HOLDER), "1 placeholders of images"),
    (lambda llm: llm.generate(shown(HOLDER, "x.png")), "must be a PIL image"),
    (lambda llm: llm.generate({"prompt": HOLDER, "multi_modal_data": {"video": 1}}), "only images"),
    (lambda llm: llm.generate({"prompt": HOLDER, "multi_modal_data": [1]}), "must be an object"),
    (lambda llm: llm.chat(user({"type": "image"})), "has no image"),
    (lambda llm: llm.chat(user({"type": "image_url"})), "image_url: is missing"),
    (lambda llm: llm.chat(user({"type": "image_url", "image_url": {"url": 3}})), "must be a URL"),
    (lambda llm: llm.chat(user({"type": "image_url", "image_url": {"url": "http://a/b"}})), "nothing is fetched"),
    (lambda llm: llm.chat(user({"type": "input_audio", "input_audio": {}})), "takes text and images"),
    (lambda llm: llm.chat(user(*[{"type": "image_pil", "image_pil": picture(1)}] * 3)), "one image more than the 2"),
    (lambda llm: llm.chat(user({"type": "image_pil", "image_pil": picture(1)}, text(HOLDER))), "2 placeholders"),
    (
        lambda llm: llm.chat(user({"type": "image_url", "image_url": {"url": url(picture(1)), "detail": "low"}})),
        "detail: has no effect",
    ),
]


@pytest.mark.parametrize(("call", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_shown_is_refused_by_name(llm: LLM, call: Any, reason: str) -> None:
    with pytest.raises(QuireError, match=reason):
        call(llm)


def test_a_model_for_text_refuses_images_and_their_settings(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "text")
    with LLM(folder, **SETTINGS) as llm:
        with pytest.raises(InvalidRequest, match="takes text only"):
            llm.chat(user({"type": "image_url", "image_url": {"url": url(picture(1))}}))
        with pytest.raises(InvalidRequest, match="takes text only"):
            llm.generate(shown("a", picture(1)))
    for setting in ({"limit_mm_per_prompt": {"image": 1}}, {"allowed_local_media_path": str(tmp_path)}):
        with pytest.raises(ConfigError, match="takes none"):
            LLM(folder, **SETTINGS, **setting)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"limit_mm_per_prompt": {"video": 1}}, r"limit_mm_per_prompt\.video"),
        ({"limit_mm_per_prompt": {"image": -1}}, "must be a whole number"),
        ({"mm_processor_kwargs": {"max_pixels": 100}}, "max_pixels"),
        ({"mm_processor_kwargs": {"max_pixels": 10**9}}, "max_pixels"),
        ({"mm_processor_kwargs": {"fps": 2}}, r"mm_processor_kwargs\.fps"),
        ({"allowed_local_media_path": "/no/such/folder"}, "is not a folder"),
    ],
)
def test_settings_that_make_no_sense_are_refused(folder: Path, setting: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(folder, **SETTINGS, **setting)


def test_fewer_pixels_make_fewer_tokens(folder: Path) -> None:
    with LLM(folder, **SETTINGS, mm_processor_kwargs={"max_pixels": 8 * 64}) as llm:
        (found,) = llm.generate(shown(HOLDER, picture(1)), GREEDY)
        assert len(found.prompt_token_ids) == 2 + 2 * 3


def test_an_image_is_found_on_disk_after_a_restart_and_another_is_not(folder: Path, tmp_path: Path) -> None:
    tiers = {"host_cache_memory": "1MiB", "disk_cache_path": str(tmp_path / "blocks"), "disk_cache_memory": "16MiB"}
    settings: dict[str, Any] = {**SETTINGS, **tiers, "tier_write": "through", "block_size": 4}
    prompt = f"hello {HOLDER}tell me more"
    found, stored = [], 0
    for seed in (1, 1, 2):
        with LLM(folder, **settings) as llm:
            for _ in range(2_000 if found else 0):  # steps, until the files of the run before have been listed
                llm.generate("more", GREEDY)
                if llm.stats().tiers.disk_used >= max(stored, 1):
                    break
            (output,) = llm.generate(shown(prompt, picture(seed)), GREEDY)
            stored = llm.stats().tiers.disk_used
            found.append((tokens([output])[0], output.num_cached_tokens or 0))
    (first, none), (again, cached), (_, other) = found
    assert first == again
    assert none == 0
    assert cached > len("hello ") + 15  # behind the image
    assert other <= len("hello ") + 1


def test_an_engine_that_is_recorded_refuses_images(folder: Path, tmp_path: Path) -> None:
    with (
        LLM(folder, **SETTINGS, record=str(tmp_path / "recording")) as llm,
        pytest.raises(InvalidRequest, match="text only"),
    ):
        llm.generate(shown(HOLDER, picture(1)))
