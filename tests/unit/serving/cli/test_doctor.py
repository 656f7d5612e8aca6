from __future__ import annotations

from dataclasses import replace

from quire.config.sizes import MIB
from quire.serving.cli.doctor import describe_gemms, describe_hardware, find_slow
from tests.unit.config.machines import LAPTOP, SERVER


def test_hardware_is_described_with_what_is_there_and_what_is_missing() -> None:
    described = dict(describe_hardware(LAPTOP))
    assert described["CPU"] == "laptop, 8 cores"
    assert described["ISA"].startswith("avx2 (without")
    assert described["fast types"] == "float32"
    assert described["CUDA"] == "none"
    assert dict(describe_hardware(SERVER))["cuda:0"].startswith("big, 79.0 GiB free of 80.0 GiB")


def test_a_machine_with_nothing_wrong_has_no_findings() -> None:
    assert find_slow(SERVER, has_nvidia_driver=True) == []


def test_slow_things_are_named_with_a_fix_worst_first() -> None:
    poor = replace(LAPTOP, cores=2, available_memory=500 * MIB, isa=frozenset())
    findings = find_slow(poor, has_nvidia_driver=True)
    assert [finding.cause.split()[0] for finding in findings] == ["an", "this", "this", "only", "only"]
    assert "CUDA build" in findings[0].fix
    assert "float32" in findings[1].cause
    assert all(finding.fix for finding in findings)


def test_missing_native_kernels_are_named_with_the_reason() -> None:
    (finding, *_) = find_slow(replace(LAPTOP, native_refusal="no compiler was there"), has_nvidia_driver=False)
    assert finding.cause == "no compiler was there"
    assert "make clean setup" in finding.fix
    assert "pip install --force-reinstall --no-deps -e ." in finding.fix


def test_a_better_path_that_was_not_built_is_named_beside_the_one_in_use() -> None:
    moved = replace(LAPTOP, cpu_path="portable", unbuilt_path="avx2")
    (finding, *_) = find_slow(moved, has_nvidia_driver=False)
    assert finding.cause == "this CPU can run the avx2 kernels, which were not built; portable is used"
    assert "pip install --force-reinstall --no-deps -e ." in finding.fix


def test_each_kind_of_weight_is_named_with_what_multiplies_by_it() -> None:
    native = replace(LAPTOP, native_refusal=None, cpu_path="avx2", level_panels=True, supports_bf16=False)
    assert dict(describe_gemms(native)) == {
        "float32 weights": "avx2",
        "quantized weights": "avx2, as stored in the file, activations as integers",
        "bfloat16 weights": "avx2, widened to float32 in registers",
    }
    on_tiles = replace(native, cpu_path="amx", supports_bf16=True, tile_units=True, bf16_dots=True)
    assert dict(describe_gemms(on_tiles))["bfloat16 weights"] == "amx, in tiles"
    by_dots = replace(on_tiles, cpu_path="i8mm", tile_units=False)
    assert dict(describe_gemms(by_dots))["bfloat16 weights"] == "i8mm, by dot products of bfloat16"
    assert describe_gemms(replace(native, native_refusal="not built")) == [("gemms", "torch")]
