"""What users call a model, and the files that are meant."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from quire.runtime.loading import resolve
from quire.runtime.loading.catalogue import CATALOGUE, DEFAULT, PackagedModel
from quire.runtime.loading.resolve import ModelFiles, resolve_model
from quire.types.errors import ConfigError, ModelLoadError


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    path = touch(tmp_path / "tiny.Q4_0.gguf")
    assert resolve_model(str(path)) == ModelFiles("tiny.Q4_0", path, "gguf")


def test_any_file_of_a_split_set_means_the_first(tmp_path: Path) -> None:
    path = touch(tmp_path / "big-00002-of-00003.gguf")
    assert resolve_model(str(path)).path == tmp_path / "big-00001-of-00003.gguf"


def test_a_folder_is_a_model_by_its_config_or_its_only_gguf(tmp_path: Path) -> None:
    path = touch(tmp_path / "model" / "m.gguf")
    assert resolve_model(str(path.parent)) == ModelFiles("m", path, "gguf")
    config = touch(path.with_name("config.json"))
    expected = ModelFiles("model", path.parent, "hf")
    assert resolve_model(str(path.parent)) == resolve_model(str(config)) == expected


def test_a_folder_with_several_models_asks_which(tmp_path: Path) -> None:
    touch(tmp_path / "a.gguf")
    touch(tmp_path / "b.gguf")
    with pytest.raises(ConfigError, match=r"has 2 GGUF models \(a\.gguf, b\.gguf\); give the path of one of them"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(("name", "message"), [("m.bin", "can run code"), ("m.txt", "is no model file")])
def test_files_of_other_kinds_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(touch(tmp_path / name)))


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter_config.json", "is a LoRA adapter, not a model; .*--lora-modules NAME=FOLDER"),
        ("model.safetensors", "has weights but no config.json; download all of the model's files"),
    ],
)
def test_a_folder_that_is_no_whole_model_says_what_it_is(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("page", ["https://huggingface.co/org/name", "https://hf.co/org/name/tree/main"])
def test_the_page_of_a_hub_model_leads_to_its_name(page: str) -> None:
    with pytest.raises(ConfigError, match=r"give the name in it: org/name$"):
        resolve_model(page)


def test_a_misspelt_catalogue_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=f"no model is called 'smollm2-135m-instuct'; did you mean {DEFAULT}"):
        resolve_model("smollm2-135m-instuct")


def test_a_misspelt_path_gets_a_suggestion(tmp_path: Path) -> None:
    path = touch(tmp_path / "smollm2-q4.gguf")
    with pytest.raises(ConfigError, match=f"did you mean {path}"):
        resolve_model(str(tmp_path / "smolm2-q4.gguf"))


@pytest.mark.parametrize("name", ["", "  ", "zzzzzz", "./nothing", "/no/such/folder/x", "a/b/c", "a\0b", "some.gguf"])
def test_a_name_that_means_nothing_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    assert caught.value.setting == "model"
    assert "\n" not in str(caught.value)


def test_no_name_means_the_packaged_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[PackagedModel, bool]] = []

    def fetch(model: PackagedModel, environment: object, *, recheck: bool, progress: object) -> Path:
        asked.append((model, recheck))
        return tmp_path / "m.gguf"

    monkeypatch.setattr(resolve, "fetch_packaged", fetch)
    files = resolve_model(None, recheck=True)
    assert files == resolve_model(DEFAULT.upper()) == ModelFiles(DEFAULT, tmp_path / "m.gguf", "gguf")
    assert asked == [(CATALOGUE[DEFAULT], True), (CATALOGUE[DEFAULT], False)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for huggingface_hub: remembers what it was asked, answers with a folder, or raises."""
    state = SimpleNamespace(calls=[], error=None, folder=tmp_path / "snapshot")

    def snapshot_download(repository: str, **options: object) -> str:
        state.calls.append((repository, options))
        if state.error is not None:
            raise state.error
        return str(state.folder)

    module = ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.delenv("QUIRE_OFFLINE", raising=False)
    return state


def test_a_hub_name_fetches_safetensors_and_json_but_no_code(hub: SimpleNamespace) -> None:
    touch(hub.folder / "config.json")
    assert resolve_model("org/name@v1.0") == ModelFiles("org/name@v1.0", hub.folder, "hf")
    repository, options = hub.calls[0]
    assert (repository, options["revision"], options["local_files_only"]) == ("org/name", "v1.0", False)
    assert set(options["allow_patterns"]) == {"*.json", "*.safetensors", "*.jinja", "vocab.txt"}
    stored = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "chat_template.jinja",
        "modeling.py",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/config.json",
        "other/model.safetensors",
    ]
    wanted = {name for name in stored if any(fnmatch(name, pattern) for pattern in options["allow_patterns"])}
    ignored = {name for name in stored if any(fnmatch(name, pattern) for pattern in options["ignore_patterns"])}
    assert wanted - ignored == set(stored[:3])


def test_the_modules_of_a_sentence_encoder_are_fetched_too(hub: SimpleNamespace) -> None:
    touch(hub.folder / "config.json")
    touch(hub.folder / "modules.json")
    resolve_model("org/name@v1.0")
    _, (_, options) = hub.calls
    stored = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin")
    wanted = [name for name in stored if any(fnmatch(name, pattern) for pattern in options["allow_patterns"])]
    assert wanted == list(stored[:3])
    assert options["revision"] == "v1.0"


def test_a_hub_name_with_a_file_fetches_only_that_file_and_its_set(hub: SimpleNamespace) -> None:
    path = touch(hub.folder / "q" / "big-00001-of-00002.gguf")
    files = resolve_model("org/name:q/big-00001-of-00002.gguf")
    assert (files.path, files.kind) == (path, "gguf")
    assert hub.calls[0][1]["allow_patterns"] == ["q/big-00001-of-00002.gguf", "q/big-00002-of-00002.gguf"]
    assert hub.calls[0][1]["ignore_patterns"] is None


@pytest.mark.parametrize("name", ["org/name:../../x.gguf", "org/name:/etc/x.gguf", "org/name:a/../x.gguf", "org/.."])
def test_a_hub_name_cannot_lead_out_of_its_repository(hub: SimpleNamespace, name: str) -> None:
    with pytest.raises(ConfigError, match="leads out of the repository"):
        resolve_model(name)
    assert not hub.calls


def test_a_catalogue_name_may_stand_for_a_hub_name(hub: SimpleNamespace) -> None:
    touch(hub.folder / "config.json")
    assert resolve_model("qwen3-0.6b").name == "qwen3-0.6b"
    assert hub.calls[0][0] == "Qwen/Qwen3-0.6B"


def test_offline_the_hub_is_only_asked_for_what_it_has(hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    hub.error = FileNotFoundError("nothing cached")
    with pytest.raises(ModelLoadError, match="is not in the hub's cache and QUIRE_OFFLINE is set"):
        resolve_model("org/name")
    assert hub.calls[0][1]["local_files_only"] is True


def test_a_failing_hub_is_one_line_with_a_fix(hub: SimpleNamespace) -> None:
    hub.error = type("GatedRepoError", (OSError,), {})("403 Forbidden\nmany more lines")
    told = r"\(GatedRepoError: 403 Forbidden\); accept its terms on the hub, then set HF_TOKEN or run: hf auth login"
    with pytest.raises(ModelLoadError, match=told) as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["org/name", "org/name:missing.gguf"])
def test_a_repository_without_the_wanted_files_says_which(hub: SimpleNamespace, name: str) -> None:
    hub.folder.mkdir()
    with pytest.raises(ModelLoadError, match=r"no config\.json; name its GGUF file|no such file"):
        resolve_model(name)


def test_without_huggingface_hub_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ModelLoadError,
        match=r"need the package huggingface_hub; run pip install .*'\.\[hub\]'",
    ):
        resolve_model("org/name")
