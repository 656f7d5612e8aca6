from __future__ import annotations

import platform
from pathlib import Path

import pytest

from quire.kernels.native import loader
from quire.runtime import hardware, host_memory
from quire.runtime.hardware import detect_hardware, read_cpuinfo

X86 = """processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) Platinum 8481C
flags		: fpu avx2 avx512f avx512_bf16 amx_bf16

processor	: 1
model name	: another
flags		: fpu
"""
ARM = """processor	: 0
Features	: fp asimd asimddp bf16 i8mm
CPU implementer	: 0x41
CPU part	: 0xd40
"""


def test_an_x86_cpuinfo_gives_name_and_flags_of_the_first_core() -> None:
    name, isa = read_cpuinfo(X86)
    assert name == "Intel(R) Xeon(R) Platinum 8481C"
    assert isa == {"fpu", "avx2", "avx512f", "avx512_bf16", "amx_bf16"}


def test_an_arm_cpuinfo_gives_the_parts_name_and_its_features() -> None:
    assert read_cpuinfo(ARM) == ("Arm Neoverse V1", frozenset({"fp", "asimd", "asimddp", "bf16", "i8mm"}))
    assert read_cpuinfo(ARM.replace("0xd40", "0xfff"))[0] == "Arm implementer 0x41 part 0xfff"


def test_bfloat16_that_oneDNN_emulates_is_not_taken_for_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert not hardware._multiplies_bf16(frozenset({"avx2", "avx512f", "avx512_vnni"}))


def test_an_empty_cpuinfo_is_not_an_error() -> None:
    assert read_cpuinfo("") == ("", frozenset())


def test_this_machine_is_described() -> None:
    facts = detect_hardware()
    assert facts.machine == platform.machine()
    assert facts.cores >= 1
    assert 0 < facts.available_memory <= facts.total_memory


def test_a_control_groups_limits_count_when_they_are_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    for name, text in {
        "memory.max": str(64 * mib),
        "memory.current": str(40 * mib),
        "memory.stat": f"anon 5\ninactive_file {8 * mib}\n",
        "cpu.max": "100000 100000",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(loader, "CGROUP", tmp_path)
    assert host_memory.read_host_memory() == (64 * mib, 32 * mib)
    assert loader.usable_cores() == 1


def test_an_unlimited_control_group_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = host_memory.read_host_memory()[0]
    (tmp_path / "memory.max").write_text("max")
    (tmp_path / "memory.current").write_text("1")
    (tmp_path / "cpu.max").write_text("max 100000")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(str(2**63 - 4096))
    (tmp_path / "memory/memory.usage_in_bytes").write_text("1")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    assert host_memory.read_host_memory()[0] == total


@pytest.mark.parametrize(
    ("value", "cores", "logged"),
    [("1", (0, 3), "pinned to cores 0,3"), ("1", (), "threads are not pinned"), ("0", (), "")],
)
def test_the_log_names_the_cores_that_threads_are_pinned_to(
    value: str, cores: tuple[int, ...], logged: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wishes: list[bool] = []
    monkeypatch.setenv("QUIRE_CPU_PIN", value)
    monkeypatch.setattr(hardware, "why_not_native", lambda _dtype, _device: None)
    monkeypatch.setattr(hardware, "pin_threads", lambda *, wanted: wishes.append(wanted) or cores)
    with caplog.at_level("INFO", logger="quire.runtime"):
        hardware.pin_cpu_threads()
    assert wishes == [value == "1"]
    assert logged in caplog.text
    assert bool(caplog.text) == bool(logged)
