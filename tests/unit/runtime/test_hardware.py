from __future__ import annotations

import platform

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


def test_an_empty_cpuinfo_is_no_error() -> None:
    assert read_cpuinfo("") == ("", frozenset())


def test_this_machine_is_described() -> None:
    facts = detect_hardware()
    assert facts.machine == platform.machine()
    assert facts.cores >= 1
    assert 0 < facts.available_memory <= facts.total_memory
