"""kill -9 of the engine, again and again, under load."""

from __future__ import annotations

import statistics

import pytest

from kill_drill import Drills
from real_server import RealServer, is_alive, num_files, num_threads, resident_bytes
from tests.soak.conftest import Note, Start

pytestmark = [pytest.mark.soak, pytest.mark.model]
KILLS, WARM_UP, COLD_STARTS = 20, 4, 5
SIZES = ("--threads", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory", "64MiB",
         "--max-model-len", "512", "--max-restart-delay", "0.1")  # fmt: skip
MIB = 2**20


def footprint(server: RealServer) -> tuple[int, int, int]:
    """Bytes, files and threads of the processes that stay: supervisor and edge."""
    stay = [server.pid, *server.processes("quire.serving.edge_main")]
    return sum(map(resident_bytes, stay)), sum(map(num_files, stay)), sum(map(num_threads, stay))


def test_twenty_kills_tell_every_client_within_a_second_and_leak_nothing(start_default: Start, note: Note) -> None:
    server = start_default(*SIZES)
    edges, engines = server.processes("quire.serving.edge_main"), [server.engine_pid()]
    first_engine_bytes = resident_bytes(server.engine_pid())
    drills, prints, cold = Drills(server, max_tokens=24), [], [server.boot_seconds]
    for number in range(KILLS):
        if number % (KILLS // COLD_STARTS) == 0:
            twin = start_default(*SIZES)  # a cold start now, while the machine is as fast as for the restarts
            cold.append(twin.boot_seconds)
            twin.close()
        drill = drills.run()
        engines.append(server.engine_pid())
        prints.append(footprint(server))
        assert drill.unanswered == []
        assert [asked for asked in drill.clients if asked.ending == "broken"] == []
    server.wait(server.is_idle)
    told = [seconds for drill in drills.done for seconds in drill.told_after]
    ready = [drill.ready_after for drill in drills.done]
    note(
        kills=KILLS,
        clients_told=len(told),
        told_after_max_s=max(told),
        told_after_median_s=statistics.median(told),
        unready_after_max_s=max(drill.unready_after for drill in drills.done),
        cold_start_s=cold,
        ready_after_median_s=statistics.median(ready),
        ready_after_max_s=max(ready),
        edge_and_supervisor_mib=[round(size / MIB, 1) for size, _, _ in prints],
        files=[files for _, files, _ in prints],
        threads=[threads for _, _, threads in prints],
        engine_mib=(round(first_engine_bytes / MIB), round(resident_bytes(server.engine_pid()) / MIB)),
    )
    assert max(told) <= 1.0
    assert statistics.median(ready) <= statistics.median(cold) + 1.0
    assert max(ready) <= max(cold) + 1.0
    assert not [pid for pid in engines[:-1] if is_alive(pid)]
    assert server.processes("quire.serving.edge_main") == edges
    assert len(server.processes()) == 2
    assert prints[-1][0] - prints[WARM_UP][0] <= 4 * MIB
    assert prints[-1][1:] == prints[WARM_UP][1:]


def test_twenty_kills_under_load_leave_no_request_without_a_delivered_byte_unanswered(
    start_tiny: Start, note: Note
) -> None:
    server = start_tiny("--max-num-seqs", "6", "--max-restart-delay", "0.1")
    drills = Drills(server, max_tokens=300)
    for _ in range(KILLS):
        drill = drills.run()
        assert drill.unanswered == []
        assert [asked for asked in drill.clients if asked.ending == "broken"] == []
    server.wait(server.is_idle)
    clients = [asked for drill in drills.done for asked in drill.clients]
    answered = [asked for asked in clients if asked.ending == "answer"]
    for asked in answered:
        alone = server.post("/v1/completions", drills.body(asked.name)).json()["choices"][0]["text"]
        assert asked.text == alone
    note(
        kills=KILLS,
        clients=len(clients),
        in_engine=sum(drill.num_in_engine for drill in drills.done),
        answered=len(answered),
        broken_off_streams=sum(len(drill.broken_off) for drill in drills.done),
    )
