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
    "quire bench serve --rate 2 --num-prompts 100": "open loop: Poisson arrivals, two requests per second",
    "quire bench serve --rate 1 --rate 2 --rate 4 --plot latency.svg --output run.json": "three rates, with a plot",
    "quire bench serve --concurrency 16 --goodput ttft:500 --goodput tpot:50": "closed loop, with latency objectives",
    "quire bench serve --workload trace.csv --rate 2": "replay the prompts and arrivals of a file, at two per second",
    "quire bench serve --url http://host:8000 --endpoint chat --no-ignore-eos": "any OpenAI-compatible server",
}


def add_bench(commands: Commands[OneLineParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a server, or the engine alone",
        description="Measure a running server, or the engine alone.",
        **examples(
            {
                "quire bench serve --rate 2": "measure the latencies that clients of a running server see",
                "quire bench throughput --num-prompts 64": "measure how many tokens per second the engine generates",
                "quire bench latency --batch-size 1": "measure the times of the first token and of each further one",
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
        help="measure a running server under load: TTFT, TPOT, latency between events, goodput",
        description="Put a load on a running OpenAI-compatible server and measure the latencies of its clients.",
        **examples(SERVE_EXAMPLES),
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (http://127.0.0.1:8000)")
    parser.add_argument("--api-key", metavar="KEY", help="API key for the server ($QUIRE_API_KEY)")
    parser.add_argument("-m", "--model", help="name of the model at the server (the first one that it lists)")
    parser.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="endpoint to call; random prompts are text for chat, token ids for completions (completions)",
    )
    add_debug(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate",
        type=float,
        action="append",
        default=[],
        metavar="R",
        help="open loop: requests per second, or inf for all at once; repeat it for a sweep",
    )
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop: keep this many requests running")
    load.add_argument("--warmup", type=int, default=2, metavar="N", help="requests to send before the measurement (2)")
    load.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds after which a request counts as failed (600)"
    )
    _add_workload(parser, num_prompts=100)
    body = parser.add_argument_group("requests")
    body.add_argument("--vocab-size", type=int, default=32_000, help="random token ids are below this number (32000)")
    body.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="do not send ignore_eos, so that answers may end early; for servers that refuse it",
    )
    body.add_argument("--extra-body", metavar="JSON", help="more fields for every request, as a JSON object")
    body.add_argument(
        "--goodput",
        action="append",
        default=[],
        metavar="NAME:MS",
        help="objective of a good request: ttft, tpot, itl or e2e within MS milliseconds; repeatable",
    )
    out = _add_output(parser)
    out.add_argument("--detail", action="store_true", help="also write the times of every request to --output")
    out.add_argument("--plot", metavar="FILE", help="draw the distributions of the latencies in this SVG file")


def _add_throughput(kinds: Commands[OneLineParser]) -> None:
    parser = kinds.add_parser(
        "throughput",
        help="measure the engine's tokens per second, with all requests at once",
        description="Measure the tokens per second of an engine in this process, with all requests at once.",
        **examples(
            {
                "quire bench throughput": "64 requests with prompts of 256 tokens and answers of 64",
                "quire bench throughput --workload prompts.json --repeats 3": "the requests of a file, three times",
            }
        ),
    )
    add_model(parser)
    _add_workload(parser, num_prompts=64)
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="number of measured runs (1)")
    _add_output(parser)
    add_loading(add_engine(parser))


def _add_latency(kinds: Commands[OneLineParser]) -> None:
    parser = kinds.add_parser(
        "latency",
        help="measure the time to the first token and per further token of one batch",
        description="Measure the time to the first token and per further token of one batch, in this process.",
        **examples(
            {
                "quire bench latency": "one request with a prompt of 128 tokens and an answer of 128",
                "quire bench latency --batch-size 16 --input-len 512": "sixteen requests at once, with longer prompts",
            }
        ),
    )
    add_model(parser)
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="number of requests in the batch (1)")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens of each prompt (128)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens of each answer (128)")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="number of measured runs, after a warm-up (5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random prompts (0)")
    _add_output(parser)
    add_loading(add_engine(parser))


def _add_workload(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    """Add the flags of the workload. `num_prompts` is the default number of random requests."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-prompts", type=int, metavar="N", help=f"number of requests ({num_prompts}; with --workload: all)"
    )
    group.add_argument(
        "--workload", metavar="FILE", help="take requests from this JSON, CSV or text file instead of random ones"
    )
    group.add_argument("--input-len", type=int, default=256, metavar="N", help="tokens of a random prompt (256)")
    group.add_argument(
        "--output-len", type=int, default=64, metavar="N", help="tokens of the answer to a random prompt (64)"
    )
    group.add_argument(
        "--spread",
        type=float,
        default=0.0,
        metavar="X",
        help="random lengths are between 1-X and 1 times --input-len and --output-len (0)",
    )
    group.add_argument(
        "--prefix-len", type=int, default=0, metavar="N", help="number of tokens that all random prompts begin with (0)"
    )
    group.add_argument("--seed", type=int, default=0, help="seed of random prompts and arrivals (0)")


def _add_output(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("output")
    group.add_argument("--output", metavar="FILE", help="write the results to this JSON file")
    return group
