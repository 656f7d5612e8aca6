"""Tests whether a tenant can learn from the time to first token what another one has sent. One server, two API keys.

    python -m benchmarks.tenant_probe
    python -m benchmarks.tenant_probe --pairs 400 --shared      # also what a cache shared by all keys reveals

For every pair the victim sends a prompt; then the prober sends the same prompt and a new one of the same length, in
random order, and times both. AUC is the probability that a prompt sent by the victim is answered sooner than a new one:
0.5 reveals nothing, 1 reveals everything. The prober has the victim's key (same tenant) or another one (other tenant).
Goals: same tenant at least 0.95, other tenant at most 0.55; --strict exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import secrets
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from benchmarks.report import ROOT, facts, publish, save
from benchmarks.serving.server import Contestant, running

VOCABULARY = range(100, 40_000)
WARM_UP = 5  # pairs that are not counted
MOST_OTHER, LEAST_SAME = 0.55, 0.95
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Probe:
    """Seconds to the first token, of prompts that the victim had sent and of new ones."""

    name: str
    auc: float
    error: float  # standard error of an AUC of 0.5 over as many pairs
    sent_ms: float
    fresh_ms: float
    pairs: int


class Client:
    """One tenant's connection."""

    def __init__(self, url: str, key: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def ask(self, prompt: list[int]) -> float:
        """Return the seconds until the one requested token arrives."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0})
        start = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, self._headers)
        answer = self._connection.getresponse()
        text = answer.read()
        seconds = time.perf_counter() - start
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}: {text.decode(errors='replace')}")
        return seconds


def auc(sooner: Times, later: Times) -> float:
    """Return the probability that a time of the first kind is below one of the second; ties count half."""
    below = (sooner[:, None] < later[None, :]).mean() + 0.5 * (sooner[:, None] == later[None, :]).mean()
    return float(below)


def probe(name: str, victim: Client, prober: Client, pairs: int, num_tokens: int, rng: random.Random) -> Probe:
    """Let the victim send prompts, and time the prober's requests."""
    sent: list[float] = []
    fresh: list[float] = []
    for number in range(WARM_UP + pairs):
        known, unknown = (rng.choices(VOCABULARY, k=num_tokens) for _ in range(2))
        victim.ask(known)
        kinds = [(known, sent), (unknown, fresh)]
        rng.shuffle(kinds)
        for prompt, times in kinds:
            seconds = prober.ask(prompt)
            if number >= WARM_UP:
                times.append(seconds)
    error = ((2 * pairs + 1) / (12 * pairs * pairs)) ** 0.5
    medians = (1e3 * float(np.median(sent)), 1e3 * float(np.median(fresh)))
    return Probe(name, auc(np.array(sent), np.array(fresh)), error, *medians, pairs)


def serve_and_probe(args: argparse.Namespace, *, shared: bool) -> list[Probe]:
    """Start a server with two keys, and probe it with both."""
    keys, rng = [secrets.token_hex(24) for _ in range(2)], random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        file.write_text("\n".join(keys))
        options = f"--api-key-file {file} --max-model-len {4 * args.prompt_tokens}"
        options += f" --model {args.model}" if args.model else ""
        options += " --shared-prefix-cache" if shared else ""
        command = f"{sys.executable} -m quire serve --port {{port}} --no-playground {options}"
        with running(
            Contestant("quire", command, {"PYTHONPATH": str(ROOT / "src")}, "/ready"), args.time_limit
        ) as server:
            victim, other = (Client(server.url, key) for key in keys)
            sizes = (args.pairs, args.prompt_tokens, rng)
            if shared:
                return [probe("other tenant, shared cache", victim, other, *sizes)]
            return [probe("same tenant", victim, victim, *sizes), probe("other tenant", victim, other, *sizes)]


def main() -> None:
    args, where = _parse(), facts()
    probes = serve_and_probe(args, shared=False)
    if args.shared:
        probes += serve_and_probe(args, shared=True)
    header = ["prober", "AUC", "+-", "TTFT of prompts sent before, ms", "of fresh ones, ms", "pairs"]
    rows = [
        [p.name, f"{p.auc:.3f}", f"{p.error:.3f}", f"{p.sent_ms:.1f}", f"{p.fresh_ms:.1f}", p.pairs] for p in probes
    ]
    title = f"What the time to first token gives away, prompts of {args.prompt_tokens} tokens"
    publish(title, header, rows, where)
    save(args.out, title, where, {"probes": [asdict(each) for each in probes]})
    same, other = probes[0].auc, max(probes[1].auc, 1 - probes[1].auc)
    missed = [f"same tenant {same:.3f} < {LEAST_SAME}"] if same < LEAST_SAME else []
    missed += [f"other tenant {other:.3f} > {MOST_OTHER}"] if other > MOST_OTHER else []
    for line in missed:
        print(f"goal missed: {line}")
    sys.exit(bool(missed and args.strict))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tenant_probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="", help="default: the embedded one")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--shared", action="store_true", help="also probe a server with --shared-prefix-cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds a server may take to start")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
