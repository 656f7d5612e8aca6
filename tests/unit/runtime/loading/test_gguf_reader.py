"""GGUF headers: right ones read whole, wrong ones refused by name."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from gguf_files import Stored, stored, text, value, write_gguf
from quire.runtime.loading.gguf.cursor import Cursor, Texts
from quire.runtime.loading.gguf.reader import GgufFile
from quire.types.errors import ModelLoadError

EVERY_KIND = {
    "u8": struct.pack("<IB", 0, 200),
    "i8": struct.pack("<Ib", 1, -100),
    "u16": struct.pack("<IH", 2, 60_000),
    "i16": struct.pack("<Ih", 3, -30_000),
    "u32": 4_000_000_000,
    "i32": struct.pack("<Ii", 5, -2_000_000_000),
    "f32": 0.5,
    "bool": True,
    "text": "héllo",
    "u64": struct.pack("<IQ", 10, 2**63),
    "i64": struct.pack("<Iq", 11, -(2**62)),
    "f64": struct.pack("<Id", 12, 0.1),
    "texts": ["", "a", "ü"],
    "floats": [0.25, -1.0],
    "bools": [True, False],
}


def matrix(name: str = "a", rows: int = 2, columns: int = 4) -> Stored:
    return stored(name, np.arange(rows * columns, dtype=np.float32).reshape(rows, columns))


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_metadata_value_is_read_back(tmp_path: Path, version: int) -> None:
    file = GgufFile(write_gguf(tmp_path / "m.gguf", EVERY_KIND, [], version=version))
    expected = {
        "u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000, "u32": 4_000_000_000, "i32": -2_000_000_000, "f32": 0.5,
        "bool": True, "text": "héllo", "u64": 2**63, "i64": -(2**62), "f64": 0.1,
        "texts": ["", "a", "ü"], "floats": [0.25, -1.0], "bools": [True, False],
    }  # fmt: skip
    found = {key: list(value) if isinstance(value, Texts) else value for key, value in file.metadata.items()}
    assert found == expected
    assert file.metadata["bool"] is True


def test_the_strings_of_a_file_that_is_opened_again_are_found_without_going_through_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", EVERY_KIND, [matrix("a", 3, 4)])
    first = GgufFile(path)
    monkeypatch.setattr(Cursor, "_end_of_texts", None)
    again = GgufFile(path)
    assert list(again.metadata["texts"]) == list(first.metadata["texts"]) == ["", "a", "ü"]
    assert again.metadata["bools"] == [True, False]
    assert again.tensors == first.tensors


def test_the_strings_of_a_file_that_was_replaced_are_found_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for texts in (["a", "bb"], ["ccc", "d"], ["", "a longer one"]):
        path.unlink(missing_ok=True)
        file = GgufFile(write_gguf(path, {"texts": texts, "after": 7}, []))
        assert list(file.metadata["texts"]) == texts
        assert file.metadata["after"] == 7


def test_the_strings_of_a_file_that_was_overwritten_in_place_are_found_anew(tmp_path: Path) -> None:
    path, other = write_gguf(tmp_path / "m.gguf", {"texts": ["a", "bb"]}, []), tmp_path / "other.gguf"
    assert list(GgufFile(path).metadata["texts"]) == ["a", "bb"]
    content = write_gguf(other, {"texts": ["aaaa", "bb"]}, []).read_bytes()
    path.write_bytes(content)
    assert list(GgufFile(path).metadata["texts"]) == ["aaaa", "bb"]


def test_tensors_have_torch_order_and_their_own_bytes(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "m.gguf", {}, [matrix("a", 3, 4), matrix("b", 1, 2)]))
    assert file.tensors["a"].shape == (3, 4)
    assert file.tensors["a"].ggml_type.name == "F32"
    assert file.raw("b").view(np.float32).tolist() == [0.0, 1.0]


def test_a_tensor_that_was_forgotten_is_read_again(tmp_path: Path) -> None:
    tensors = [matrix("a", 3, 4), matrix("b", 300, 64), matrix("c", 1, 2)]
    file = GgufFile(write_gguf(tmp_path / "m.gguf", {}, tensors))
    before = {name: file.raw(name).copy() for name in file.tensors}
    views = {name: file.raw(name) for name in file.tensors}
    for name in file.tensors:
        file.forget(name)
    for name, bytes_before in before.items():
        assert np.array_equal(views[name], bytes_before)
        assert np.array_equal(file.raw(name), bytes_before)


def test_an_alignment_of_its_own_is_honoured(tmp_path: Path) -> None:
    tensors = [matrix("a"), matrix("b")]
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": 64}, tensors, alignment=64)
    assert GgufFile(path).raw("b").view(np.float32).tolist() == list(range(8))


def test_tensors_may_lie_in_another_order_than_they_are_listed(tmp_path: Path) -> None:
    first, second = matrix("a"), matrix("b", 2, 4)
    path = write_gguf(
        tmp_path / "m.gguf", {}, [Stored(**{**vars(first), "offset": 32}), Stored(**{**vars(second), "offset": 0})]
    )
    assert set(GgufFile(path).tensors) == {"a", "b"}


def test_the_reference_writer_and_reader_agree_with_ours(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "b"])
    weight = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    writer.add_tensor("w", weight)
    writer.add_tensor(
        "q", gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1), raw_dtype=gguf.GGMLQuantizationType.Q4_1
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile(path)
    assert file.metadata["llama.context_length"] == 77
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, Texts)
    assert list(tokens) == ["a", "b"]
    assert file.tensors["q"].shape == (6, 64)
    for tensor in gguf.GGUFReader(path).tensors:
        assert file.tensors[tensor.name].offset == tensor.data_offset
        assert file.raw(tensor.name).tobytes() == tensor.data.tobytes()


def replace(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


WRONG_TENSORS: dict[str, tuple[list[Stored], str]] = {
    "overlap": ([matrix("a"), Stored("b", (2, 4), 0, bytes(32), offset=0)], "overlaps a"),
    "gap": ([matrix("a"), Stored("b", (2, 4), 0, bytes(64), offset=64)], "b: leaves 32 unexplained bytes after a"),
    "misaligned": ([matrix("a"), Stored("b", (2, 4), 0, bytes(32), offset=33)], "b: offset 33 is not a multiple of 32"),
    "far away": ([Stored("b", (2, 4), 0, bytes(32), offset=1 << 62)], "b: is cut off"),
    "twice": ([matrix("a"), matrix("a")], "a: appears twice"),
    "unknown type": ([Stored("a", (32,), 99, bytes(32))], "a: has unknown ggml type 99"),
    "known but refused": ([Stored("a", (32,), 4, bytes(32))], r"a: has ggml type Q4_2 \(4\)"),
    "broken blocks": ([Stored("a", (2, 33), 2, bytes(64))], "a: rows of 33 values are not whole Q4_0 blocks"),
    "no dimensions": ([Stored("a", (), 0, b"")], "a: has 0 dimensions"),
    "five dimensions": ([Stored("a", (1,) * 5, 0, bytes(4))], "a: has 5 dimensions"),
    "empty": ([Stored("a", (2, 0), 0, b"")], "a: has an empty dimension"),
    "no name": ([Stored("", (8,), 0, bytes(32))], "name of tensor 0: is '', which is not a valid name"),
    "huge": ([Stored("a", (1 << 40, 1 << 40), 0, bytes(32))], "a: shape .* needs .* bytes"),
    "overflowing": ([Stored("a", (1 << 32, 1 << 32, 4), 0, bytes(32))], "a: shape .* needs .* bytes"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_a_wrong_tensor_is_refused_by_name_and_reason(tmp_path: Path, case: str) -> None:
    tensors, message = WRONG_TENSORS[case]
    path = write_gguf(tmp_path / "m.gguf", {}, tensors)
    with pytest.raises(ModelLoadError, match=message) as caught:
        GgufFile(path)
    assert caught.value.file == str(path)


WRONG_METADATA: dict[str, tuple[list[tuple[str, object]], str]] = {
    "twice": ([("a", 1), ("a", 2)], "a: appears twice"),
    "unknown type": ([("a", struct.pack("<I", 13))], "a: holds a value of unknown type 13"),
    "nested": ([("a", struct.pack("<IIQ", 9, 9, 1))], "a: holds an array inside an array"),
    "truth": ([("a", struct.pack("<IB", 7, 2))], "a: has a boolean that is neither 0 nor 1"),
    "not text": ([("a", struct.pack("<I", 8) + text(b"\xff\xfe"))], "a: is not UTF-8"),
    "endless array": ([("a", struct.pack("<IIQ", 9, 4, 1 << 60))], "a: the file ends"),
    "endless texts": ([("a", struct.pack("<IIQ", 9, 8, 1 << 60))], "a: the file ends"),
    "endless text in texts": ([("a", struct.pack("<IIQQ", 9, 8, 1, 2**64 - 1))], "a: the file ends"),
    "endless text": ([("a", struct.pack("<IQ", 8, 1 << 62))], "a: claims .* characters"),
    "unprintable": ([("a\nb", 1)], r"metadata key 0: is 'a\\nb', which is not a valid name"),
    "no key": ([("", 1)], "metadata key 0: is '', which is not a valid name"),
    "alignment": ([("general.alignment", 24)], "general.alignment: must be a power of two"),
    "alignment as text": ([("general.alignment", "32")], "general.alignment: must be a power of two"),
    "zero alignment": ([("general.alignment", 0)], "general.alignment: must be a power of two"),
}


@pytest.mark.parametrize("case", WRONG_METADATA)
def test_wrong_metadata_is_refused_by_key_and_reason(tmp_path: Path, case: str) -> None:
    pairs, message = WRONG_METADATA[case]
    path = write_gguf(tmp_path / "m.gguf", pairs, [matrix()])
    with pytest.raises(ModelLoadError, match=message):
        GgufFile(path)


def test_texts_are_decoded_when_they_are_asked_for_also_after_the_file_is_closed(tmp_path: Path) -> None:
    pairs = [("good", ["a", "ü"]), ("a", struct.pack("<IIQ", 9, 8, 2) + text("ok") + text(b"\xff"))]
    file = GgufFile(write_gguf(tmp_path / "m.gguf", pairs, [matrix()]))
    file.close()
    good, bad = file.metadata["good"], file.metadata["a"]
    assert isinstance(good, Texts)
    assert isinstance(bad, Texts)
    assert (len(good), good[1], good[:1]) == (2, "ü", ["a"])
    assert len(bad) == 2
    with pytest.raises(ModelLoadError, match="a: entry 1 is not UTF-8"):
        bad[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", "pointer of Git LFS.*git lfs pull"),
        (b"GG", "the file ends"),
        (b"PK\x03\x04" + bytes(60), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "has GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 50, 0), "claims 1125899906842624 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 50), "claims 1125899906842624 metadata keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + bytes(20), "claims 3 metadata keys"),
    ],
)
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        GgufFile(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="No such file"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match="cannot be opened|not a regular file"):
        GgufFile(tmp_path)


def test_a_file_one_byte_short_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"k": value("v")}, [matrix("a", 8, 4)])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ModelLoadError, match="a: is cut off: 1 bytes are missing at the end of the file; download it again"
    ):
        GgufFile(path)


def test_bytes_after_the_last_tensor_may_only_be_zero(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, [matrix("a", 8, 4)])
    path.write_bytes(path.read_bytes() + bytes(100))
    assert set(GgufFile(path).tensors) == {"a"}
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ModelLoadError, match="has 101 unexplained bytes after a"):
        GgufFile(path)


def test_views_of_the_bytes_outlive_close(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "m.gguf", {}, [matrix()]))
    raw = file.raw("a")
    file.close()
    file.close()
    assert raw.view(np.float32)[7] == 7.0
    raw[:] = 255  # a private mapping: the file does not change
    assert GgufFile(tmp_path / "m.gguf").raw("a").view(np.float32)[7] == 7.0
