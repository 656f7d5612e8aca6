"""What of the kernel for one row can be checked without a GPU: its records, and when it is used."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from quire.kernels.attention_rule import AttentionRule
from quire.kernels.cuda import nvrtc, row_program, row_records
from quire.kernels.cuda.row_phases import AttentionPhase, GemvPhase, Phase, ScaledRowsWeight
from quire.kernels.norm import Norm
from quire.kernels.triton.gemm_w4 import pack_w4

FOLDER = Path(row_program.__file__).parent
BF16 = torch.bfloat16
SIZES = {"u64": 8, "long long": 8, "int": 4, "float": 4, "short": 2}
PLAIN = {ctypes.c_uint64: "u64", ctypes.c_int64: "long long", ctypes.c_int32: "int", ctypes.c_float: "float"}


def fields_of(struct: str, file: str) -> list[tuple[str, str]]:
    """(type, name) of a struct of plain numbers, in order."""
    text = re.sub(r"//[^\n]*", "", (FOLDER / file).read_text())
    body = re.search(rf"struct {struct} {{(.*?)}};", text, re.DOTALL)
    assert body is not None
    lines = (line.strip() for line in body.group(1).split(";"))
    found = []
    for line in filter(None, lines):
        kind = next(kind for kind in SIZES if line.startswith(kind))
        found += [(kind, name.strip()) for name in line[len(kind) :].split(",")]
    return found


def test_records_are_those_of_the_source() -> None:
    pairs = [("Phase", "row_common.cuh", row_records.PhaseRecord), ("Source", "row_ring.cuh", row_records.SourceRecord)]
    for struct, file, record in pairs:
        names = {**PLAIN, ctypes.c_int16: "short"}
        ours = [(names[kind], name) for name, kind in record._fields_]
        assert ours == fields_of(struct, file)
        assert ctypes.sizeof(record) % 8 == 0  # copied by words of eight bytes


def test_numbers_that_stand_in_both_languages_are_the_same() -> None:
    text = "".join((FOLDER / name).read_text() for name in row_program._FILES)
    found = dict(re.findall(r"constexpr int (\w+) = (\d+);", text))
    ours = {"WARPS": row_records.WARPS, "TILE": row_records.TILE}
    ours |= {"PIECE_UNITS": row_records.PIECE_UNITS}
    ours |= {"UNIT": row_records.UNIT, "PIECE_STEPS": row_records.PIECE_STEPS, "MOST_TABLES": row_records.MOST_TABLES}
    assert {name: int(found[name]) for name in ours} == ours
    assert row_records.TILE * int(found["PITCH"]) == row_records._PIECE
    teams, turns = sum(row_records.WARPS >> shift for shift in (1, 2, 3)), int(found["TURNS"])
    static = 2 * ctypes.sizeof(row_records.PhaseRecord) + 16 * teams * turns + 8 * row_records.WARPS
    assert static + 8 * turns * row_records.TILE * row_records.WARPS <= row_records._STATIC_BYTES
    kinds = re.search(r"enum Kind \{(.*?)\}", text)
    assert kinds is not None
    numbers = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", kinds.group(1))}
    assert numbers == {name: getattr(row_records, name) for name in numbers}


def product(outputs: int, inputs: int, *, device: str = "meta") -> GemvPhase:
    return GemvPhase(torch.empty(outputs, inputs, dtype=BF16, device=device), None, torch.empty(outputs, dtype=BF16))


def attention() -> AttentionPhase:
    cache = torch.zeros(2, 2, 16, 64, dtype=BF16)
    vectors = torch.zeros(8 * 64, dtype=BF16), torch.zeros(4 * 64, dtype=BF16)
    return AttentionPhase(*vectors, 4, 2, 64, None, None, cache, cache, None, 0, AttentionRule(0.125))


@pytest.mark.parametrize(
    ("outputs", "inputs", "warps"),
    [
        (6144, 4096, 8),  # 3 tiles for each of 132 programs: 8 warps take 4 pieces of each of them one after the other
        (4096, 4096, 4),  # 2 tiles: two teams
        (8192, 64, 2),  # 4 tiles of a single piece: four teams
        (1024, 2048, 8),  # one tile
    ],
)
def test_as_many_warps_share_a_tile_as_end_all_tiles_soonest(outputs: int, inputs: int, warps: int) -> None:
    phases = [product(outputs, inputs, device="cpu")]
    (record,), (source,) = row_records.lay_out(phases, row_records.Vectors(phases, torch.device("cpu")), 132)
    assert 1 << record.team_shift == 1 << source.team_shift == warps


def test_small_layers_are_run_together_and_large_ones_are_not() -> None:
    small: list[Phase] = [product(4096, 1024), attention()]
    assert row_program.why_not_faster(small) is None
    large: list[Phase] = [product(28_672, 16_384), attention()]
    assert "896 MiB" in str(row_program.why_not_faster(large))
    assert row_program.why_not_faster([*large, attention()]) is None  # it is the layer that counts


def test_weights_of_8_bits_stay_with_other_kernels_and_those_of_4_do_not() -> None:
    numbers = torch.zeros(32, 64, dtype=torch.int8)
    scaled = GemvPhase(ScaledRowsWeight(numbers, torch.ones(32)), None, torch.zeros(32, dtype=BF16))
    assert "8-bit" in str(row_program.why_not_faster([scaled]))
    levels, scales = torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 2, dtype=torch.float16)
    nibbles = GemvPhase(pack_w4(levels, scales, None), None, torch.zeros(64, dtype=BF16))
    assert row_program.why_not_faster([nibbles]) is None


def test_phases_that_the_kernel_lacks() -> None:
    vector = torch.zeros(64, dtype=BF16)
    weight = torch.zeros(64, 64, dtype=BF16)
    assert row_program.takes_phase(GemvPhase(weight, vector, None))
    assert not row_program.takes_phase(GemvPhase(weight, vector, vector))  # others read it meanwhile
    assert not row_program.takes_phase(GemvPhase(weight.float(), vector, None))
    assert not row_program.takes_phase(GemvPhase(torch.zeros(64, 40, dtype=BF16), vector[:40], None))  # no whole units
    assert row_program.takes_phase(attention())
    odd = torch.zeros(2, 2, 16, 80, dtype=BF16)  # heads of 80 numbers
    vectors = torch.zeros(8 * 80, dtype=BF16), torch.zeros(4 * 80, dtype=BF16)
    assert not row_program.takes_phase(
        AttentionPhase(*vectors, 4, 2, 80, None, None, odd, odd, None, 0, AttentionRule(0.1))
    )


class Launches:
    """In the place of the kernel: keeps what it was launched with. `spoils`: a launch that changes its stream; `makes`:
    what all of them leave as the first number of it."""

    def __init__(self, spoils: int | None = None, makes: bytes = b"") -> None:
        self.spoils, self.makes = spoils, makes
        self.seen: list[tuple[int, list[row_records.PhaseRecord]]] = []

    def launch(self, programs: int, threads: int, arguments: tuple[row_records.RunRecord, ctypes.c_uint64]) -> None:
        run, address = arguments
        assert (programs, threads) == (4, 32 * row_records.WARPS)
        records = (row_records.PhaseRecord * run.num_phases).from_address(address.value)
        copies = [row_records.PhaseRecord.from_buffer_copy(record) for record in records]
        if len(self.seen) == self.spoils:
            ctypes.memset(run.stream, 0, 2)
        ctypes.memmove(run.stream, self.makes, len(self.makes))
        self.seen.append((run.num_sources, copies))


def layer() -> list[Phase]:
    vectors = [torch.zeros(size, dtype=BF16) for size in (8 * 64, 4 * 64, 128)]
    weights = [torch.zeros(sizes, dtype=BF16) for sizes in ((512, 256), (256, 256), (256, 256), (256, 128))]
    norm, cache = Norm(torch.ones(256, dtype=BF16), 1e-6), torch.zeros(2, 2, 16, 64, dtype=BF16)
    qkv, attended, gated = vectors
    return [
        GemvPhase(weights[0], None, qkv, norm=norm),
        AttentionPhase(qkv, attended, 4, 2, 64, None, None, cache, cache, None, 0, AttentionRule(0.125)),
        GemvPhase(weights[1], attended, None, adds=True),
        GemvPhase(weights[2], None, gated, norm=norm, activation="silu"),
        GemvPhase(weights[3], gated, None, adds=True),
    ]


def made(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> row_program.RowProgram:
    """A program of two layers on the CPU, whose kernel does nothing."""
    monkeypatch.setattr(row_program, "compile_source", lambda *_: b"")
    monkeypatch.setattr(row_program, "CudaKernel", lambda *_: launches)
    monkeypatch.setattr(row_program, "shared_limit", lambda _: 225_000)
    for name in ("device", "get_device_capability", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    first = layer()
    return row_program.RowProgram([*first, *first], torch.device("cpu"))


def test_phases_know_who_wrote_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    program = made(monkeypatch, launches)
    (num_sources, together), *apart = launches.seen
    assert num_sources == 8
    assert [record.source_phase for record in together] == [-1, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert [record.before_phase for record in together if record.adds] == [-1, 2, 4, 7]
    assert [bool(record.plain_source) for record in together] == [True] + [False] * 9  # the stream as it came
    assert [bool(record.plain_target) for record in together] == [False] * 5 + [True, True, False, True, True]
    assert [num_sources for num_sources, _ in apart] == [1, 0, 1, 1, 1] * 2  # each phase once, by itself
    assert all(record.plain_source and record.plain_target for _, (record,) in apart)
    assert program.longest == 4_096


@pytest.mark.parametrize("spoils", [0, 1, 10])
def test_a_program_that_differs_from_its_phases_is_refused(spoils: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(nvrtc.CudaError, match="failed its check"):
        made(monkeypatch, Launches(spoils))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_program_that_makes_no_numbers_is_refused(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.tensor([number], dtype=BF16).view(torch.int16).numpy().tobytes()
    with pytest.raises(nvrtc.CudaError, match="failed its check: its result is not finite"):
        made(monkeypatch, Launches(makes=bits))


def test_a_machine_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_program.why_not_row_program(torch.device("cpu")) == "it runs only on CUDA devices"
    monkeypatch.setattr(torch.version, "cuda", None)
    nvrtc.why_no_nvrtc.cache_clear()
    assert nvrtc.why_no_nvrtc() == "torch was built without CUDA"
    nvrtc.why_no_nvrtc.cache_clear()


def test_code_that_cannot_be_kept_costs_nothing(tmp_path: Path) -> None:
    place = tmp_path / "folder" / "code.cubin"
    nvrtc._keep(place, b"code")
    assert place.read_bytes() == b"code"
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    nvrtc._keep(blocked / "code.cubin", b"code")
    assert [path.name for path in place.parent.iterdir()] == ["code.cubin"]
