"""`quire replay`: runs a recorded load again without its model, with the recorded or another configuration."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.policy import POLICY_NAMES, RESERVING, read_policy_settings
from quire.config.tiers import EVICTION_NAMES, PREEMPTION_NAMES, TierConfig, check_tiers
from quire.serving.cli.arguments import Commands, OneLineParser, add_debug, examples, json_object
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.engine import CacheConfig, SchedulerConfig
    from quire.simulator.recording import Recording
    from quire.simulator.run import Run

RECORDED = "recorded"
_SCHEDULER = ("policy", "max_num_seqs", "max_num_batched_tokens", "preemption")
_CACHE = {
    "num_kv_blocks": "num_blocks",
    "enable_prefix_caching": "enable_prefix_caching",
    "prefix_eviction": "eviction",
}
DIFFERENT = 1  # exit code of a check that failed
ROWS = 40
_EXTRAS = ("prefix cache", "host memory", "disk tier")


def add_replay(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="run a recorded load again without its model, with the same or another policy",
        description="Run a recording of `--record FILE` again on this CPU, without its model, and print what the "
        "engine decided and why, or what it would have decided with another configuration.",
        **examples(
            {
                "quire replay run.jsonl": "which requests ran, waited and were preempted, and why",
                "quire replay run.jsonl --check": "exit with 1 unless this version decides the same",
                "quire replay run.jsonl --policy lpm --against fcfs": "compare two policies",
                "quire replay run.jsonl --num-kv-blocks 500 --against recorded --html run.html": "compare: less memory",
            }
        ),
    )
    parser.add_argument("file", metavar="FILE", help="a recording, made with --record")
    parser.add_argument(
        "--check", action="store_true", help="run the recorded configuration and fail at the first difference"
    )
    parser.add_argument(
        "--against",
        choices=(*POLICY_NAMES, RECORDED),
        help="compare with this policy (all else equal), or with the recorded configuration",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON instead of tables")
    out.add_argument("--html", metavar="FILE", help="write the timelines to this HTML file")
    out.add_argument("--rows", type=int, metavar="N", help=f"most requests in a table; 0: all ({ROWS})")
    add_debug(parser)
    _add_changes(parser.add_argument_group("what if (default: as recorded)"))


def _add_changes(group: argparse._ArgumentGroup) -> None:
    absent = argparse.SUPPRESS
    group.add_argument(
        "--policy", choices=POLICY_NAMES, default=absent, help="scheduling policy, the order of requests"
    )
    group.add_argument("--policy-config", type=json_object, default=absent, help="settings of --policy, as JSON")
    group.add_argument("--max-num-seqs", type=int, default=absent, help="most sequences that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, default=absent, help="most tokens in one step")
    group.add_argument("--num-kv-blocks", type=int, default=absent, help="size of the KV cache in blocks")
    group.add_argument(
        "--host-cache-blocks",
        type=int,
        default=absent,
        help="KV blocks in host memory; 0: neither host memory nor a disk tier",
    )
    group.add_argument(
        "--preemption",
        choices=PREEMPTION_NAMES,
        default=absent,
        help="what to do with the KV blocks of a preempted request",
    )
    group.add_argument(
        "--prefix-eviction", choices=EVICTION_NAMES, default=absent, help="which cached prefixes are evicted first"
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=absent,
        help="keep the KV blocks of prompts and answers for prompts with the same beginning",
    )


def run_replay(args: argparse.Namespace) -> int:
    """Run a recording again. Raises ConfigError or RecordingError."""
    from quire.simulator.reader import read_recording

    changes = changed_names(args)
    _check_flags(args, changes)
    recording = read_recording(Path(args.file))
    if args.check:
        return _check(recording, args)
    runs, facts = _runs(recording, args, changes)
    _show(runs, facts | {"recording": _facts(recording)}, args)
    return 0


def _check_flags(args: argparse.Namespace, changes: list[str]) -> None:
    if args.rows is not None and args.rows < 0:
        raise ConfigError("rows", f"must be at least 0, got {args.rows}", "0 shows all")
    if args.check and (changes or args.against):
        raise ConfigError("check", "runs a recording as it was", "leave the changes out")
    for name in ("html", "rows"):
        if args.check and getattr(args, name) is not None:
            raise ConfigError(name, "is of no use with --check, which compares and draws nothing", "leave one out")
    if args.html is not None and Path(args.html).resolve() == Path(args.file).resolve():
        raise ConfigError("html", f"{args.html} is the recording itself", "name another file")


def changed_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the settings that were given."""
    names = (*_SCHEDULER, "policy_config", *_CACHE, "host_cache_blocks")
    return [name for name in names if name in args]


def changed(
    args: argparse.Namespace, cache: CacheConfig, scheduler: SchedulerConfig
) -> tuple[CacheConfig, SchedulerConfig]:
    """Return the configuration with the settings that were given. Raises ConfigError."""
    given: dict[str, Any] = {name: getattr(args, name) for name in _SCHEDULER if name in args}
    if "policy" in given or "policy_config" in args:
        policy = given.get("policy", scheduler.policy)
        given["policy_settings"] = read_policy_settings(policy, getattr(args, "policy_config", None))
    in_cache = {field: getattr(args, name) for name, field in _CACHE.items() if name in args}
    if "host_cache_blocks" in args:
        tiers = cache.tiers if args.host_cache_blocks else TierConfig()  # the disk tier needs host memory
        in_cache["tiers"] = replace(tiers, host_blocks=args.host_cache_blocks)
    cache, scheduler = replace(cache, **in_cache), replace(scheduler, **given)
    if scheduler.policy in RESERVING:
        _check_reserving(args, cache, scheduler)
    return cache, scheduler


def _check_reserving(args: argparse.Namespace, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    """Raise ConfigError for given settings that are impossible with a policy that reserves memory for each sequence."""
    tiers = cache.tiers if "host_cache_blocks" in args else TierConfig()
    check_tiers(tiers, getattr(args, "preemption", "recompute"), scheduler.policy, cache.layout)
    if getattr(args, "enable_prefix_caching", False):
        reason = f"shares memory, and the {scheduler.policy!r} policy gives each sequence its own"
        raise ConfigError("enable_prefix_caching", reason, "leave it out")


def _check(recording: Recording, args: argparse.Namespace) -> int:
    from quire.simulator.replay import replay

    if recording.inexact:
        raise ConfigError("check", f"cannot tell: {recording.inexact[0]}", "leave --check out")
    result = replay(recording)
    steps, requests, facts = len(result.run.steps), len(result.run.outcomes), _facts(recording)
    if args.json:
        difference = None if result.difference is None else str(result.difference)
        counts = {"steps": steps, "requests": requests}
        print(json.dumps({"same": difference is None, **counts, "difference": difference, "recording": facts}))
        return 0 if result.difference is None else DIFFERENT
    for line in _remarks({"recording": facts}):
        print(line)
    if result.difference is None:
        print(f"the same: {steps} step calls, {requests} requests")
    else:
        print(f"not the same: {result.difference}")
    return 0 if result.difference is None else DIFFERENT


def _runs(recording: Recording, args: argparse.Namespace, changes: list[str]) -> tuple[list[Run], dict[str, Any]]:
    """Return the requested runs, the baseline first, and facts about how they were made."""
    if not changes and args.against is None:
        from quire.simulator.replay import replay

        result = replay(recording)
        note = None if result.difference is None else str(result.difference)
        return [result.run], {"difference": note, "inexact": recording.inexact}
    from quire.simulator.what_if import Scenario

    setup, scenario = recording.setup, Scenario.from_recording(recording)
    cache, scheduler = changed(args, setup.cache, setup.scheduler)
    name = ", ".join(f"{each.replace('_', ' ')} {getattr(args, each)}" for each in changes) or RECORDED
    if changes == ["policy"] or args.against in POLICY_NAMES:
        name = scheduler.policy  # only the policy differs
    runs = [scenario.run(name, cache, scheduler)]
    if args.against == RECORDED:
        runs.insert(0, scenario.run(RECORDED, setup.cache, setup.scheduler))
    elif args.against is not None:
        settings = read_policy_settings(args.against, None)
        other = replace(scheduler, policy=args.against, policy_settings=settings)
        runs.insert(0, scenario.run(args.against, cache, other))
    fit, without = scenario.fit, [note for run in runs if (note := _missing_features(run, (setup.cache, cache)))]
    prices = {"step_seconds": fit.cost.step, "prompt_token_seconds": fit.cost.token, "row_seconds": fit.cost.row}
    fitted = {"fitted_steps": fit.num_used, "steps": fit.num_steps, "error": fit.error}
    return runs, {"cost": prices | fitted, "without": without}


def _missing_features(run: Run, others: Iterable[CacheConfig]) -> str:
    """Return a remark on features of the other configurations that a run does not have; "" if there are none."""
    wanted = set().union(*map(_extras, others))
    lost = [name for name in _EXTRAS if name in wanted - _extras(run.cache)]
    return f"{run.name}: without {', '.join(lost)}" if lost else ""


def _extras(cache: CacheConfig) -> set[str]:
    switches = (cache.enable_prefix_caching, cache.tiers.enabled, cache.tiers.disk_path)
    return {name for name, is_on in zip(_EXTRAS, switches, strict=True) if is_on}


def _facts(recording: Recording) -> dict[str, Any]:
    setup = recording.setup
    return {
        "quire": setup.quire,
        "date": setup.date,
        "tokens": setup.tokens,
        "over": recording.end_reason,
        "dead": recording.dead,
    }


def _show(runs: list[Run], facts: dict[str, Any], args: argparse.Namespace) -> None:
    from quire.simulator.html import render
    from quire.simulator.summary import export_changes, export_run
    from quire.simulator.text import show_changes, show_run

    if args.html is not None:
        title = " and ".join(run.name for run in runs)
        try:
            Path(args.html).write_text(render(f"{Path(args.file).name}: {title}", runs), encoding="utf-8")
        except OSError as error:
            raise ConfigError("html", f"{args.html} cannot be written: {error.strerror}", "name a file") from None
    if args.json:
        found = facts | {"runs": [export_run(run) for run in runs]}
        print(json.dumps(found | {"changes": export_changes(*runs)} if len(runs) == 2 else found))
        return
    if remarks := _remarks(facts):
        print(*remarks, "", sep="\n")
    rows = ROWS if args.rows is None else args.rows
    print(show_changes(runs[0], runs[1], rows) if len(runs) == 2 else show_run(runs[0], rows))


def _remarks(facts: dict[str, Any]) -> list[str]:
    """Return the remarks to print before the tables."""
    lines = []
    if facts["recording"]["over"] is None:
        lines.append("the recording is incomplete: its last events may be missing")
    elif facts["recording"]["over"] != "closed":
        lines.append(f"the recording ended early: {facts['recording']['over']}")
    if facts["recording"]["dead"] is not None:
        lines.append(f"the engine died in its last step: {facts['recording']['dead']}")
    lines += [f"not as recorded: {each}" for each in facts.get("inexact", ())]
    lines += facts.get("without", ())
    if facts.get("difference") is not None:
        lines.append(f"this version decides differently, and the replay stopped there: {facts['difference']}")
    if "cost" in facts:
        cost = facts["cost"]
        prices = f"{1e3 * cost['step_seconds']:.3f} ms + {1e6 * cost['prompt_token_seconds']:.2f} us / prompt token"
        note = f"{prices} + {1e6 * cost['row_seconds']:.2f} us / decoding row"
        fitted = f"fitted to {cost['fitted_steps']} of {cost['steps']} steps, {cost['error']:.0%} off over all"
        lines.append(f"a step takes {note}: {fitted}")
    return lines
