"""The flags that commands share, with vLLM's names, and the parser. Default values are those of the settings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, cast

from quire.config.parallel import EXECUTOR_NAMES
from quire.config.policy import POLICY_NAMES
from quire.config.tiers import EVICTION_NAMES, PREEMPTION_NAMES
from quire.serving.cli.suggestions import closest_command, unknown_flags
from quire.serving.cli.vllm_flags import split_vllm_flags, take_vllm_flags
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.arguments import EngineSettings
    from quire.types.sampling import SamplingParams

Commands = argparse._SubParsersAction  # the type of `add_subparsers`, which has no public name


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. The engine checks its members."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


ENGINE_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "--dtype": (str, "type of weights and activations: float32, bfloat16, float16, or auto (chosen for the device)"),
    "--device": (str, "device to run on: cpu, cuda, cuda:N, or auto"),
    "--block-size": (int, "token slots per KV block, 1 to 256 (16)"),
    "--num-kv-blocks": (int, "size of the KV cache in blocks, instead of --kv-cache-memory"),
    "--kv-cache-memory": (
        str,
        'size of the KV cache, like "2GiB" (on a CPU 1GiB, or less if less memory is free; on a GPU what is left)',
    ),
    "--gpu-memory-utilization": (float, "share of the GPU's memory that the process may use (0.9)"),
    "--max-model-len": (int, "most tokens of a sequence, prompt and answer together"),
    "--max-num-seqs": (int, "most sequences that run at once (64 on a CPU, 256 on a GPU)"),
    "--max-num-batched-tokens": (int, "most tokens in one step (512 on a CPU, 2048 to 16384 on a GPU)"),
    "--policy": (str, f"scheduling policy, the order of requests: {', '.join(POLICY_NAMES)} (fcfs)"),
    "--policy-config": (json_object, 'settings of --policy, as JSON: {"ttft": 0.5, "tpot": 0.05}'),
    "--prefix-eviction": (str, f"which cached prefixes are evicted first: {', '.join(EVICTION_NAMES)} (lru)"),
    "--preemption": (
        str,
        f"what to do with the KV blocks of a preempted request: {', '.join(PREEMPTION_NAMES)} (auto: the faster one)",
    ),
    "--host-cache-memory": (str, 'host memory for KV blocks evicted from the device, like "4GiB" (none)'),
    "--swap-space": (float, "the same as --host-cache-memory, as a number of GiB"),
    "--disk-cache-path": (
        str,
        "a folder for KV blocks evicted from host memory; only you may have access to it (none)",
    ),
    "--disk-cache-memory": (str, 'how much disk space --disk-cache-path may use, like "50GiB"'),
    "--tier-write": (
        str,
        "when KV blocks are saved to host memory and disk: back: when evicted; through: when computed (back)",
    ),
    "--kv-role": (
        str,
        "prefill: share the KV blocks of computed prompts by --kv-transport; decode: load them; both (none of these)",
    ),
    "--kv-transport": (
        str,
        "how engines share KV blocks: shm://NAME, or tcp://HOST:PORT: prefill engines listen, decode engines connect",
    ),
    "--kv-transport-memory": (str, "memory for the KV blocks that --kv-transport shares (1GiB)"),
    "--kv-token-file": (
        str,
        "a file with a secret, the same for all engines of a --kv-transport by TCP; required beyond 127.0.0.1",
    ),
    "--threads": (int, "number of CPU threads (all cores)"),
    "--quantization": (
        str,
        "quantize the layers' weights while they are loaded: fp8, int8 or int4 (as the checkpoint stores them)",
    ),
    "--cpu-weights": (
        str,
        "CPU activations for quantized weights: integer8, integer16, integer (8 bit for GGUF, else 16), float or auto",
    ),
    "--kv-cache-dtype": (
        str,
        "type of the KV cache: auto (as --dtype); fp8, fp8_e4m3 or int8: half the memory of bfloat16; int4: a third",
    ),
    "--kv-layout": (
        str,
        "layout of the KV cache: paged, or virtual: the blocks of a sequence are contiguous in virtual memory (paged)",
    ),
    "--attention-backend": (str, "attention kernels: triton, native, flashinfer, gather, reference or auto"),
    "--speculative-config": (
        json_object,
        'speculation, as JSON: {"method": "ngram"}, "mtp", "self_draft", or with "model": "eagle3", "draft_model"',
    ),
    "--limit-mm-per-prompt": (json_object, 'most images of a request, as JSON: {"image": 16}'),
    "--mm-processor-kwargs": (
        json_object,
        'sizes to which images are resized, as JSON: {"max_pixels": ...}, longest_edge or max_soft_tokens (see docs)',
    ),
    "--allowed-local-media-path": (str, "the folder whose files the file:// URLs of images may name (none)"),
    "--tensor-parallel-size": (int, "number of ranks that each compute a part of every layer, one per GPU (1)"),
    "--pipeline-parallel-size": (int, "number of pipeline stages that each compute some of the layers (1)"),
    "--executor": (str, f"how ranks run: {', '.join(EXECUTOR_NAMES)} (auto: single, or processes for several ranks)"),
    "--ray-address": (
        str,
        "Ray cluster for --executor ray: auto or HOST:PORT (one of this machine, started if necessary)",
    ),
    "--rank-timeout": (float, "seconds that other ranks wait for a rank without progress until the engine ends (60)"),
    "--record": (str, "record all inputs and decisions of the engine in this new file, for `quire replay`"),
    "--record-tokens": (
        str,
        "how --record stores prompts: exact, or hashed: their common beginnings, but not their texts (exact)",
    ),
    "--record-limit": (str, "largest size of the file of --record (1GiB)"),
}
ENGINE_SWITCHES = {
    "--enable-sleep-mode": "let a GPU engine give its memory back while it sleeps (CPU engines always can)",
    "--enforce-eager": "do not capture steps as CUDA graphs: slower, for debugging",
    "--enable-expert-parallel": "give each rank of --tensor-parallel-size whole experts, not a part of every expert",
}
SHORT_FLAGS = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp"}  # vLLM's short names
ENGINE_CHOICES = {
    "--enable-prefix-caching": "keep the KV blocks of prompts and answers for prompts with the same beginning (on)"
}
LORA_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "--max-loras": (int, "most LoRA adapters that one step can use: slots on the device (8)"),
    "--max-lora-rank": (int, "largest rank of a LoRA adapter, up to 256 (16)"),
    "--max-cpu-loras": (
        int,
        "most LoRA adapters in host memory; others are read from disk when used (four times --max-loras)",
    ),
}
SAMPLING_FLAGS = {
    "--temperature": (float, "randomness of sampling; 0: always the most likely token"),
    "--top-p": (float, "sample from the most likely tokens whose probabilities add up to this share"),
    "--top-k": (int, "sample from this many most likely tokens; 0: from all"),
    "--min-p": (float, "drop tokens with less than this share of the most likely token's probability"),
    "--repetition-penalty": (float, "above 1: make tokens of the prompt and the answer less likely"),
    "--presence-penalty": (float, "above 0: make tokens that have appeared in the answer less likely"),
    "--frequency-penalty": (float, "above 0: make tokens less likely by how often they have appeared in the answer"),
    "--max-tokens": (int, "most tokens of an answer"),
    "--min-tokens": (int, "fewest tokens of an answer"),
}


class Examples(TypedDict):
    """The keyword arguments that add examples to a parser."""

    epilog: str
    formatter_class: type[argparse.HelpFormatter]


def examples(commands: dict[str, str]) -> Examples:
    """Return the keyword arguments that show commands and their descriptions at the end of `--help`."""
    lines = "\n".join(f"  {command}\n      {meaning}" for command, meaning in commands.items())
    return {"epilog": f"examples:\n{lines}", "formatter_class": argparse.RawDescriptionHelpFormatter}


class OneLineParser(argparse.ArgumentParser):
    """An argument parser without abbreviations. Its errors are one line: the cause, a suggestion, and the help
    command."""

    def __init__(self, *, prog: str, description: str, **options: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments of one command. Unknown flags are an error, except vLLM's flags that have no effect or
        another name here."""
        own: list[str] = list(sys.argv[1:] if args is None else args)
        foreign: list[tuple[str, Any]] = []
        if "--dtype" in self._option_string_actions:  # this command runs an engine
            own, foreign = split_vllm_flags(own, self)
        parsed, unknown = super().parse_known_args(own, namespace)
        if unknown and self._subparsers is None:
            self.error(unknown_flags(unknown, self))
        try:
            take_vllm_flags(foreign, parsed)
        except ConfigError as error:
            self.error(str(error))
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            close = closest_command(str(value), known)
            hint = f"did you mean {close}?" if close else f"choose from {', '.join(known)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")


def add_complete(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "complete",
        help="continue a text",
        description="Continue a text, with a model in this process or with a running server.",
        **examples(
            {
                'quire complete "The capital of France is"': "greedy, up to 128 tokens",
                "quire complete --temperature 0.8 -n 3 < prompt.txt": "three samples for the text on stdin",
                'quire complete --url http://127.0.0.1:8000 "Once upon"': "with a running server",
            }
        ),
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; read from stdin if left out")
    parser.add_argument("-n", "--n", type=int, default=1, help="number of completions (1)")
    add_model(parser)
    _add_remote(parser)
    _add_sampling(parser, {"temperature": 0.0, "max_tokens": 128})
    add_loading(add_engine(parser))


def add_chat(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with a model",
        description="Chat with a model, in this process or at a running server. MESSAGE or piped input: one answer.",
        **examples(
            {
                "quire chat": "a conversation; /help lists its commands",
                'quire chat "Why is the sky blue?"': "one answer",
                "quire chat --url http://127.0.0.1:8000 --api-key KEY": "with a running server",
            }
        ),
    )
    parser.add_argument(
        "message", nargs="?", metavar="MESSAGE", help="a message to answer; without one, chat interactively"
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message at the start of the conversation")
    add_model(parser)
    _add_remote(parser)
    _add_sampling(parser, {"max_tokens": 512}, "defaults are those of the model's generation_config.json")
    add_generation_config(add_loading(add_engine(parser)))


def add_pull(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model into the cache",
        description="Download a model into the cache, where all commands find it.",
        **examples(
            {
                "quire pull": "the default model",
                "quire pull qwen3-0.6b": "a model of the catalogue",
                "quire pull org/name:file.gguf": "one file from the hub",
            }
        ),
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a catalogue or hub name (the default model)")
    parser.add_argument("--recheck", action="store_true", help="check the hash of a model that is already in the cache")
    add_debug(parser)


def add_doctor(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="describe this machine, a model's memory plan, and what is slow and why",
        description="Describe this machine: hardware, versions, a model's memory plan, what is slow and how to fix it.",
        **examples(
            {
                "quire doctor": "with the default model's plan",
                "quire doctor --model model.gguf --max-model-len 8192": "would this fit?",
                "quire doctor --gpu": "how fast is this GPU, and how close to that are the kernels?",
            }
        ),
    )
    parser.add_argument(
        "--gpu", action="store_true", help="measure the GPU and every kernel on it, and print nothing else"
    )
    parser.add_argument("--json", action="store_true", help="with --gpu: print JSON instead of tables")
    add_model(parser)
    add_engine(parser)


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """Return the engine settings that were given; all others keep their defaults. A seed of -1 means a random seed and
    is left out."""
    flags = (*ENGINE_FLAGS, *ENGINE_SWITCHES, *ENGINE_CHOICES, "--scheduling-policy", "--task")
    flags += (*LORA_FLAGS, "--enable-lora", "--lora-modules", "--lora-experts", "--lora-dir", "--weights-dir")
    given = {name: getattr(args, name) for flag in flags if (name := field_of(flag)) in args}
    if "seed" in args and args.seed is not None and args.seed >= 0:
        given["seed"] = args.seed
    return cast("EngineSettings", given)


def sampling_params(args: argparse.Namespace, defaults: SamplingParams | None = None) -> SamplingParams:
    """Return the sampling parameters of the flags, on top of `defaults`. Raises InvalidRequest."""
    from quire.types.sampling import SamplingParams

    given = {"n": getattr(args, "n", 1), "seed": args.seed, "stop": args.stop or (), **given_sampling(args)}
    return SamplingParams(**({} if defaults is None else defaults.changed_fields()) | given)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling flags that were given or have a default, by parameter name."""
    return {name: getattr(args, name) for flag in SAMPLING_FLAGS if (name := field_of(flag)) in args}


def field_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", help="a path, a hub name or a catalogue name (the default model)")
    add_debug(parser)


def add_engine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("engine")
    for flag, (kind, text) in ENGINE_FLAGS.items():
        names = (flag,) if flag not in SHORT_FLAGS else (SHORT_FLAGS[flag], flag)
        group.add_argument(*names, type=kind, help=text, default=argparse.SUPPRESS)
    for flag, text in ENGINE_SWITCHES.items():
        group.add_argument(flag, action="store_true", help=text, default=argparse.SUPPRESS)
    for flag, text in ENGINE_CHOICES.items():
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text, default=argparse.SUPPRESS)
    return group


def add_lora(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("LoRA adapters")
    absent = argparse.SUPPRESS
    switch, use = argparse.BooleanOptionalAction, "accept requests with LoRA adapters (off)"
    group.add_argument("--enable-lora", action=switch, help=use, default=absent)
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help='LoRA adapters to load at start; clients give NAME as the model; also as JSON: {"name": ..., "path": ...}',
        default=absent,
    )
    for flag, (kind, text) in LORA_FLAGS.items():
        group.add_argument(flag, type=kind, help=text, default=absent)
    room = "support LoRA adapters of routed experts: device slots have room for A and B of every expert (off)"
    group.add_argument("--lora-experts", action=switch, help=room, default=absent)
    return group


def add_loading(group: argparse._ArgumentGroup, *, verbose: bool = True) -> argparse._ArgumentGroup:
    group.add_argument("--tokenizer", help="path or name of the model whose tokenizer is used (the model itself)")
    group.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="auto: load the weights; dummy: use random weights (auto)",
    )
    if verbose:
        shown = "print the memory plan and loading progress, even if stderr is not a terminal"
        group.add_argument("--verbose", action="store_true", default=None, help=shown)
    return group


def add_generation_config(group: argparse._ArgumentGroup) -> argparse._ArgumentGroup:
    group.add_argument(
        "--generation-config",
        metavar="SOURCE",
        help="default sampling: auto (from the model's files), none, or a folder with generation_config.json (auto)",
    )
    group.add_argument(
        "--override-generation-config",
        type=json_object,
        metavar="JSON",
        help='default sampling values in place of those of --generation-config, as JSON: {"temperature": 0.5}',
    )
    return group


def _add_remote(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url", help="use the server at this URL instead of loading a model; --model is then its name at the server"
    )
    group.add_argument("--api-key", metavar="KEY", help="API key for --url ($QUIRE_API_KEY)")


def _add_sampling(parser: argparse.ArgumentParser, defaults: dict[str, float], note: str | None = None) -> None:
    group = parser.add_argument_group("sampling", note)
    for flag, (kind, text) in SAMPLING_FLAGS.items():
        default = defaults.get(field_of(flag))
        shown = text if default is None else f"{text} ({default:g})"
        group.add_argument(flag, type=kind, help=shown, default=argparse.SUPPRESS if default is None else default)
    group.add_argument("--seed", type=int, help="seed of sampling, which makes the answer repeatable")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop string: end the answer before this text; repeatable"
    )
