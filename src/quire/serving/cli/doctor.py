"""`quire doctor`: describes the hardware, the packages and a model's memory plan, and names what is slow and why."""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from quire import __version__
from quire.config.arguments import ATTENTION_BACKENDS, EngineArguments
from quire.config.embedding import plan_encoder_memory, resolve_encoder_config
from quire.config.environment import OFFLINE
from quire.config.facts import HardwareFacts
from quire.config.lengths import with_usable_indexer
from quire.config.resolve import resolve_engine_config
from quire.config.sizes import GIB, format_size
from quire.serving.cli.arguments import engine_settings
from quire.types.errors import ConfigError, ModelLoadError, QuireError

if TYPE_CHECKING:
    from quire.runtime.loading.files import ModelFiles

REQUIRED = ("torch", "numpy", "tokenizers", "safetensors", "jinja2")
OPTIONAL = (
    "huggingface_hub", "triton",
    "starlette", "uvicorn", "uvloop", "httptools", "msgspec", "pyzmq", "prometheus_client",  # for `quire serve`
    "aiohttp", "opentelemetry-sdk",  # for `quire bench serve`, for traces
)  # fmt: skip
REBUILD = (
    "in the checkout, with a C++ compiler: make clean setup, or pip install --force-reinstall --no-deps -e . "
    "(until then torch's own operations are used)"
)
NOTABLE_ISA = {
    "x86_64": [
        "avx2",
        "f16c",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
    ],
    "aarch64": ["asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"],
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs speed or memory on this machine, and how to fix it."""

    cause: str
    fix: str


def run_doctor(args: argparse.Namespace) -> int:
    if args.gpu:
        from quire.serving.cli.doctor_gpu import run_doctor_gpu

        return run_doctor_gpu(args)
    if args.json:
        raise ConfigError("json", "is for what --gpu measures", "add --gpu or leave it out")
    from quire.runtime.hardware import detect_hardware

    facts = detect_hardware()
    print(f"quire {__version__}, Python {platform.python_version()}, {platform.system()} {facts.machine}\n")
    _print_section("hardware", describe_hardware(facts))
    _print_section("packages", [(name, _version(name)) for name in (*REQUIRED, *OPTIONAL)])
    _print_section("backends", _backends(facts))
    is_planned = _print_plan(args, facts)
    findings = find_slow(facts, has_nvidia_driver=Path("/proc/driver/nvidia/version").exists())
    print("\nwhat is slow here" if findings else "\nno performance problem was found")
    for finding in findings:
        print(f"  {finding.cause}\n    fix: {finding.fix}")
    return 0 if is_planned or args.model is None else 1


def describe_hardware(facts: HardwareFacts) -> list[tuple[str, str]]:
    """Return the names and values of the hardware, ready to print."""
    notable = NOTABLE_ISA.get(facts.machine, [])
    found = [flag for flag in notable if flag in facts.isa]
    missing = [flag for flag in notable if flag not in facts.isa]
    types = [name for name, yes in (("bfloat16", facts.supports_bf16), ("float16", facts.supports_fp16)) if yes]
    rows = [
        ("CPU", f"{facts.cpu_name}, {facts.cores} cores"),
        ("ISA", " ".join(found) + (f" (without {' '.join(missing)})" if missing else "")),
        ("fast types", ", ".join(["float32", *types])),
        ("memory", f"{format_size(facts.available_memory)} free of {format_size(facts.total_memory)}"),
    ]
    for index, gpu in enumerate(facts.cuda):
        memory = f"{format_size(gpu.free_memory)} free of {format_size(gpu.total_memory)}"
        capability = ".".join(map(str, gpu.capability))
        rows.append((f"cuda:{index}", f"{gpu.name}, {memory}, compute capability {capability}"))
    return rows if facts.cuda else [*rows, ("CUDA", "none")]


def find_slow(facts: HardwareFacts, *, has_nvidia_driver: bool) -> list[Finding]:
    """Return what makes this machine slower than it could be, worst first."""
    findings = []
    if has_nvidia_driver and not facts.cuda:
        findings.append(
            Finding(
                f"an NVIDIA driver is loaded, but torch {facts.torch_version} sees no CUDA device",
                "install a CUDA build of torch, and check that this process may use the device",
            )
        )
    if facts.native_refusal is not None and not facts.cuda:
        findings.append(Finding(facts.native_refusal, REBUILD))
    if facts.unbuilt_path is not None and not facts.cuda:
        findings.append(
            Finding(
                f"this CPU can run the {facts.unbuilt_path} kernels, which were not built; {facts.cpu_path} is used",
                "in the checkout, on this machine: pip install --force-reinstall --no-deps -e .",
            )
        )
    if not facts.supports_bf16 and not facts.cuda:
        findings.append(
            Finding(
                "this CPU has no bfloat16 arithmetic, so gemms run in float32: prompts take twice the time",
                "use a GPU, or a CPU with AVX-512 BF16, AMX or Arm BF16 (Sapphire Rapids, Zen 4, Neoverse V1, ...)",
            )
        )
    if facts.machine == "x86_64" and "avx2" not in facts.isa:
        findings.append(Finding("this CPU has no AVX2, so torch falls back to narrow vectors", "use a newer CPU"))
    if facts.cores < 4 and not facts.cuda:
        findings.append(Finding(f"only {facts.cores} cores may be used", "allow this process more cores"))
    if facts.available_memory < 2 * GIB:
        findings.append(
            Finding(
                f"only {format_size(facts.available_memory)} of memory is free, which keeps the KV cache small",
                "free some memory or raise the container's limit",
            )
        )
    return findings


def _backends(facts: HardwareFacts) -> list[tuple[str, str]]:
    import torch

    return [
        ("attention", ", ".join(ATTENTION_BACKENDS)),
        ("native kernels", facts.native_refusal or f"compiled for {facts.cpu_path}"),
        *describe_gemms(facts),
        ("oneDNN", "yes" if torch.backends.mkldnn.is_available() else "no"),  # type: ignore[no-untyped-call]
        ("vector width", torch.backends.cpu.get_cpu_capability()),
        ("threads", str(min(torch.get_num_threads(), facts.cores))),
    ]


def describe_gemms(facts: HardwareFacts) -> list[tuple[str, str]]:
    """Return which kernels compute gemms on this CPU, for each kind of weight."""
    if facts.native_refusal is not None:
        return [("gemms", "torch")]
    halves = f"{facts.cpu_path}, widened to float32 in registers"
    if facts.bf16_dots:
        halves = f"{facts.cpu_path}, by dot products of bfloat16"
    how = "float32 activations as integers, bfloat16 in tiles" if facts.tile_units else "activations as integers"
    return [
        ("float32 weights", str(facts.cpu_path)),
        ("quantized weights", f"{facts.cpu_path}, as stored in the file, {how}"),
        ("bfloat16 weights", "amx, in tiles" if facts.tile_units else halves),
    ]


def _print_plan(args: argparse.Namespace, facts: HardwareFacts) -> bool:
    """Print the memory plan of the model, or why there is none. Returns whether there is one."""
    from quire.runtime.loading.resolve import resolve_model

    print()
    try:
        print(
            "\n".join(_plan(resolve_model(args.model, offline=True), EngineArguments(**engine_settings(args)), facts))
        )
    except QuireError as error:
        absent = isinstance(error, ModelLoadError) and OFFLINE in str(error)
        command = " ".join(["quire pull", *([args.model] if args.model else [])])
        pull = f"the model is not here yet; run `{command}`"
        print(f"no memory plan: {pull if absent else error}")
        return False
    return True


def _plan(files: ModelFiles, arguments: EngineArguments, facts: HardwareFacts) -> list[str]:
    """Return lines that describe a model, its device and its memory plan."""
    from quire.runtime.loading.hf.sentence import read_embedding_settings
    from quire.runtime.loading.model_config import read_model_config
    from quire.runtime.models.registry import ENTRIES
    from quire.serving.assembly import PlannedEngine, as_served, find_draft

    model = as_served(read_model_config(files), arguments)
    title = f"model {files.name}: {model.architecture}, {model.num_parameters / 1e6:,.0f}M parameters"
    if ENTRIES[model.architecture].kind == "encoder":
        settings = read_embedding_settings(files)
        encoder = resolve_encoder_config(arguments, facts, model, settings)
        where = f"makes embeddings on {encoder.device.device} in {encoder.device.dtype} (LLM.embed), generates no text"
        return [title, where, str(plan_encoder_memory(arguments, facts, model, encoder, settings))]
    draft_files = find_draft(arguments, files, offline=True)
    draft = None if draft_files is None else read_model_config(draft_files)
    model = with_usable_indexer(model, arguments, facts.device)
    draft = None if draft is None else with_usable_indexer(draft, arguments, facts.device)
    config, plan = resolve_engine_config(arguments, facts, model, draft)
    where = (
        f"runs on {config.device.device} in {config.device.dtype}, {config.scheduler.max_num_seqs} sequences at once"
    )
    advice = PlannedEngine(files, model, config, plan).advice
    return [title, where, str(plan), *([] if advice is None else [advice])]


def _print_section(title: str, rows: list[tuple[str, str]]) -> None:
    print(title)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed" if package in REQUIRED else "not installed (optional)"
