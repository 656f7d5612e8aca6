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
    "--dtype": (str, "float32, bfloat16, float16 or auto: what the device is fast at"),
    "--device": (str, "cpu, cuda, cuda:N or auto"),
    "--block-size": (int, "token slots per KV block, 1 to 256 (16)"),
    "--num-kv-blocks": (int, "size of the KV cache in blocks"),
    "--kv-cache-memory": (
        str,
        'size of the KV cache, like "2GiB" (on a CPU 1GiB, or less by the free memory; on a GPU what is left)',
    ),
    "--gpu-memory-utilization": (float, "share of the GPU's memory the process may take (0.9)"),
    "--max-model-len": (int, "longest sequence, prompt and output together"),
    "--max-num-seqs": (int, "sequences that run at once (64 on a CPU, 256 on a GPU)"),
    "--max-num-batched-tokens": (int, "tokens computed in one step (512 on a CPU, 2048 to 16384 on a GPU)"),
    "--policy": (str, f"who goes first: {', '.join(POLICY_NAMES)} (fcfs)"),
    "--policy-config": (json_object, 'settings of the policy, as JSON: {"ttft": 0.5, "tpot": 0.05}'),
    "--prefix-eviction": (str, f"which cached prompts are forgotten first: {', '.join(EVICTION_NAMES)} (lru)"),
    "--preemption": (str, f"a request makes room by: {', '.join(PREEMPTION_NAMES)} (auto: what costs less time)"),
    "--host-cache-memory": (str, 'host memory for blocks the device gives up, like "4GiB" (none)'),
    "--swap-space": (float, "the same in GiB"),
    "--disk-cache-path": (str, "a folder of your own for blocks that host memory gives up (none)"),
    "--disk-cache-memory": (str, 'how much of it to fill, like "50GiB"'),
    "--tier-write": (
        str,
        "back: save a block when it is evicted (default); through: when it is computed, so that a restart finds it",
    ),
    "--kv-role": (
        str,
        "prefill: share the KV blocks of computed prompts by --kv-transport; decode: load them; both (no transport)",
    ),
    "--kv-transport": (
        str,
        "shm://NAME, or tcp://HOST:PORT: where a prefill engine listens, and what a decode engine connects to",
    ),
    "--kv-transport-memory": (str, "memory for shared KV blocks (1GiB)"),
    "--kv-token-file": (str, "a file with a secret that both ends of tcp:// know; needed beyond 127.0.0.1"),
    "--threads": (int, "CPU threads (all cores)"),
    "--quantization": (
        str,
        "fp8, int8 or int4: the layers' weights, quantized while they are loaded (as the checkpoint stores them)",
    ),
    "--cpu-weights": (
        str,
        "integer8, integer16: CPUs round rows so for quantized weights; integer: 8 for GGUF, 16 else; float: no (auto)",
    ),
    "--kv-cache-dtype": (
        str,
        "auto: as --dtype; fp8, fp8_e4m3 or int8: about half the memory per token of bfloat16; int4: a third",
    ),
    "--kv-layout": (str, "paged, or virtual: a sequence's blocks mapped side by side, for attention without tables"),
    "--attention-backend": (str, "triton, native, flashinfer, gather, reference or auto"),
    "--speculative-config": (
        json_object,
        'guess ahead and verify, as JSON: {"method": "ngram"}, "self_draft", or "draft_model" / "eagle3" and "model"',
    ),
    "--limit-mm-per-prompt": (json_object, 'how many images a request may have, as JSON: {"image": 16}'),
    "--mm-processor-kwargs": (
        json_object,
        'how large images are shown, as JSON: {"min_pixels": ..., "max_pixels": ...}',
    ),
    "--allowed-local-media-path": (str, "the folder whose files image URLs with file:// may name (none)"),
    "--tensor-parallel-size": (int, "ranks that share every layer, one per GPU (1)"),
    "--pipeline-parallel-size": (int, "stages with some of the layers each (1)"),
    "--executor": (str, f"how ranks run: {', '.join(EXECUTOR_NAMES)} (auto: single, or processes for several ranks)"),
    "--ray-address": (str, "the Ray cluster for --executor ray: auto or HOST:PORT (one of this machine, or a new one)"),
    "--rank-timeout": (float, "seconds that a rank may be behind while others wait for it (60)"),
    "--record": (str, "write all inputs and decisions to this new file, for `quire replay`"),
    "--record-tokens": (str, "exact, or hashed: it tells which prompts begin alike, not what they say (exact)"),
    "--record-limit": (str, "how large the file may become (1GiB)"),
}
ENGINE_SWITCHES = {
    "--enforce-eager": "capture no step as a CUDA graph: slower, for finding faults",
    "--enable-expert-parallel": "the ranks of --tensor-parallel-size have whole experts, not a part of every expert",
}
SHORT_FLAGS = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp"}  # vLLM's short names
ENGINE_CHOICES = {"--enable-prefix-caching": "keep computed prompts and answers for prompts that begin alike (on)"}
LORA_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "--max-loras": (int, "LoRA adapters in one step: slots on the device (8)"),
    "--max-lora-rank": (int, "the largest rank of a LoRA adapter, up to 256 (16)"),
    "--max-cpu-loras": (int, "LoRA adapters in host memory; others are read again (four times --max-loras)"),
}
SAMPLING_FLAGS = {
    "--temperature": (float, "0 picks the likeliest token"),
    "--top-p": (float, "keep the likeliest tokens up to this probability"),
    "--top-k": (int, "keep this many tokens; 0 keeps all"),
    "--min-p": (float, "drop tokens less likely than this share of the likeliest"),
    "--repetition-penalty": (float, "above 1 discourages repetition"),
    "--presence-penalty": (float, "above 0 discourages tokens that appeared"),
    "--frequency-penalty": (float, "above 0 discourages tokens by how often they appeared"),
    "--max-tokens": (int, "longest answer"),
    "--min-tokens": (int, "shortest answer"),
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
        description="Continue a text, token by token, in this process or by a running server.",
        **examples(
            {
                'quire complete "The capital of France is"': "greedy, up to 128 tokens",
                "quire complete --temperature 0.8 -n 3 < prompt.txt": "three samples of what is piped in",
                'quire complete --url http://127.0.0.1:8000 "Once upon"': "by a server that runs already",
            }
        ),
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; from stdin when left out")
    parser.add_argument("-n", "--n", type=int, default=1, help="how many completions (1)")
    add_model(parser)
    _add_remote(parser)
    _add_sampling(parser, {"temperature": 0.0, "max_tokens": 128})
    add_loading(add_engine(parser))


def add_chat(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model, in this process or at a running server. With MESSAGE or piped input: one answer.",
        **examples(
            {
                "quire chat": "a conversation; /help lists its commands",
                'quire chat "Why is the sky blue?"': "one answer",
                "quire chat --url http://127.0.0.1:8000 --api-key KEY": "with a server that runs already",
            }
        ),
    )
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="one message to answer; else a conversation")
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told before the conversation")
    add_model(parser)
    _add_remote(parser)
    _add_sampling(parser, {"max_tokens": 512}, "what is left out is as the model's makers recommend")
    add_generation_config(add_loading(add_engine(parser)))


def add_pull(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "pull",
        help="fetch a model into the cache",
        description="Fetch a model once.",
        **examples(
            {
                "quire pull": "the default model",
                "quire pull qwen3-0.6b": "a model of the catalogue",
                "quire pull org/name:file.gguf": "one file from the hub",
            }
        ),
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a catalogue or hub name; the default when left out")
    parser.add_argument("--recheck", action="store_true", help="check a file that is here already once more")
    add_debug(parser)


def add_doctor(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what was found here, what fits, what is slow and why",
        description="Look at this machine: hardware, versions, a model's memory plan, what is slow and the fix.",
        **examples(
            {
                "quire doctor": "with the default model's plan",
                "quire doctor --model model.gguf --max-model-len 8192": "would this fit?",
                "quire doctor --gpu": "how fast is this GPU, and how near to that are the kernels?",
            }
        ),
    )
    parser.add_argument("--gpu", action="store_true", help="measure the GPU and every kernel on it instead")
    parser.add_argument("--json", action="store_true", help="with --gpu: print JSON instead of tables")
    add_model(parser)
    add_engine(parser)


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """Return the engine settings that were given; all others keep their defaults. A seed of -1 means a random seed and
    is left out."""
    flags = (*ENGINE_FLAGS, *ENGINE_SWITCHES, *ENGINE_CHOICES, "--scheduling-policy", "--task")
    flags += (*LORA_FLAGS, "--enable-lora", "--lora-modules", "--lora-experts", "--lora-dir")
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
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", help="a path, a hub name or a catalogue name; the default model when left out")
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
    switch, use = argparse.BooleanOptionalAction, "take requests with LoRA adapters (off)"
    group.add_argument("--enable-lora", action=switch, help=use, default=absent)
    group.add_argument(
        "--lora-modules",
        nargs="+",
        action="extend",
        metavar="NAME=PATH",
        help='adapters to load at the start, whose names clients give as the model; or {"name": ..., "path": ...}',
        default=absent,
    )
    for flag, (kind, text) in LORA_FLAGS.items():
        group.add_argument(flag, type=kind, help=text, default=absent)
    room = "make room for LoRA adapters of routed experts: slots hold A and B of every expert (off)"
    group.add_argument("--lora-experts", action=switch, help=room, default=absent)
    return group


def add_loading(group: argparse._ArgumentGroup, *, verbose: bool = True) -> argparse._ArgumentGroup:
    group.add_argument("--tokenizer", help="another model's tokenizer: a path or a name")
    group.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    if verbose:
        shown = "show the memory plan and loading progress"
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
        help='single values of it, as JSON: {"temperature": 0.5}',
    )
    return group


def _add_remote(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", help="ask this server instead of loading a model; --model is then the name it knows")
    group.add_argument("--api-key", metavar="KEY", help="the server's key; $QUIRE_API_KEY when left out")


def _add_sampling(parser: argparse.ArgumentParser, defaults: dict[str, float], note: str | None = None) -> None:
    group = parser.add_argument_group("sampling", note)
    for flag, (kind, text) in SAMPLING_FLAGS.items():
        default = defaults.get(field_of(flag))
        shown = text if default is None else f"{text} ({default:g})"
        group.add_argument(flag, type=kind, help=shown, default=argparse.SUPPRESS if default is None else default)
    group.add_argument("--seed", type=int, help="makes the answer repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; repeatable")
