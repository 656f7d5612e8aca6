"""The flags of `quire bench`."""

from __future__ import annotations

import argparse

from quire.serving.cli.arguments import (
    Commands,
    OneLineParser,
    add_debug,
    add_engine,
    add_loading,
    add_model,
    examples,
)

SERVE_EXAMPLES = {
    "quire bench serve --rate 2 --num-prompts 100": "open loop: Poisson arrivals, two requests a second",
    "quire bench serve --rate 1 --rate 2 --rate 4 --plot latency.svg --output run.json": "a sweep, with a plot",
    "quire bench serve --concurrency 16 --goodput ttft:500 --goodput tpot:50": "closed loop, with objectives",
    "quire bench serve --workload trace.csv --rate 2": "replay prompts and arrivals of a file, at two a second",
    "quire bench serve --url http://host:8000 --endpoint chat --no-ignore-eos": "any OpenAI-compatible server",
}


def add_bench(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a server, or the engine alone",
        description="Measure a running server, or the engine alone.",
        **examples(
            {
                "quire bench serve --rate 2": "what clients of a running server feel",
                "quire bench throughput --num-prompts 64": "how many tokens a second the engine makes",
                "quire bench latency --batch-size 1": "how long a first and a further token take",
            }
        ),
    )
    kinds = parser.add_subparsers(dest="bench_command", metavar="KIND", required=True)
    _add_serve(kinds)
    _add_throughput(kinds)
    _add_latency(kinds)


def _add_serve(kinds: Commands[OneLineParser]) -> None:
    parser = kinds.add_parser(
        "serve",
        help="a load on a running server: TTFT, TPOT, latency between events, goodput",
        description="Put a load on a running OpenAI-compatible server and measure what its clients feel.",
        **examples(SERVE_EXAMPLES),
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)")
    parser.add_argument("--api-key", metavar="KEY", help="its key; $QUIRE_API_KEY when left out")
    parser.add_argument("-m", "--model", help="the model's name there; the first it lists when left out")
    parser.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="chat sends text (completions)"
    )
    add_debug(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate", type=float, action="append", default=[], metavar="R", help="requests a second; repeat it for a sweep"
    )
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop: this many at a time")
    load.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before the clock runs (2)")
    load.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for one request (600)")
    _add_workload(parser, num_prompts=100)
    body = parser.add_argument_group("requests")
    body.add_argument("--vocab-size", type=int, default=32_000, help="random token ids stay below it (32000)")
    body.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end early; for servers without ignore_eos"
    )
    body.add_argument("--extra-body", metavar="JSON", help="further fields of every request")
    body.add_argument(
        "--goodput", action="append", default=[], metavar="NAME:MS", help="ttft, tpot, itl or e2e within MS; repeatable"
    )
    out = _add_output(parser)
    out.add_argument("--detail", action="store_true", help="write every request's times too")
    out.add_argument("--plot", metavar="FILE", help="write the spread of the latencies as SVG")


def _add_throughput(kinds: Commands[OneLineParser]) -> None:
    parser = kinds.add_parser(
        "throughput",
        help="tokens a second of the engine, all requests at once",
        description="How many tokens a second the engine makes in this process when all requests are there at once.",
        **examples(
            {
                "quire bench throughput": "64 requests of 256 tokens in, 64 out",
                "quire bench throughput --workload prompts.json --repeats 3": "the requests of a file, three times",
            }
        ),
    )
    add_model(parser)
    _add_workload(parser, num_prompts=64)
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="how often (1)")
    _add_output(parser)
    add_loading(add_engine(parser))


def _add_latency(kinds: Commands[OneLineParser]) -> None:
    parser = kinds.add_parser(
        "latency",
        help="time to first token and per further token of one batch",
        description="Time to the first token and per further token of one batch, in this process.",
        **examples(
            {
                "quire bench latency": "one request, 128 tokens in, 128 out",
                "quire bench latency --batch-size 16 --input-len 512": "sixteen at once, longer prompts",
            }
        ),
    )
    add_model(parser)
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="requests at once (1)")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens of each prompt (128)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens of each answer (128)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="how often, after one that warms up (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    _add_output(parser)
    add_loading(add_engine(parser))


def _add_workload(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    """Add the flags of the workload. `num_prompts` is the default number of random requests."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-prompts", type=int, metavar="N", help=f"how many requests ({num_prompts}; of a --workload: all)"
    )
    group.add_argument(
        "--workload", metavar="FILE", help="requests from a JSON, CSV or text file instead of random ones"
    )
    group.add_argument("--input-len", type=int, default=256, metavar="N", help="tokens of a random prompt (256)")
    group.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens of its answer (64)")
    group.add_argument(
        "--spread", type=float, default=0.0, metavar="X", help="lengths vary from 1-X of that up to it (0)"
    )
    group.add_argument(
        "--prefix-len", type=int, default=0, metavar="N", help="tokens all random prompts begin with (0)"
    )
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (0)")


def _add_output(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("output")
    group.add_argument("--output", metavar="FILE", help="write the numbers as JSON")
    return group
