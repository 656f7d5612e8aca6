"""The files under deploy/ start the server with flags it has and probe routes it serves."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.serving.cli import _parser

DEPLOY = Path(__file__).parents[4] / "deploy"


def _entry_point() -> list[str]:
    text = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8")
    found = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    command: list[str] = json.loads(found[1])
    return command


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_of_the_image_asks_the_server_and_no_proxy(status: int, code: int) -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    found = re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    program, *arguments = json.loads(found[1])
    assert (program, "8000" in arguments[-1]) == ("python3", True)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        answering = threads.submit(_answer_once, server, status)
        command = [sys.executable, *(each.replace("8000", str(server.getsockname()[1])) for each in arguments)]
        proxies = {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
        ended = subprocess.run(command, env=os.environ | proxies, check=False, stderr=subprocess.DEVNULL)
        server.close()
        assert ended.returncode == code
        answering.result()


def _answer_once(server: socket.socket, status: int) -> None:
    server.settimeout(60)
    connection, _ = server.accept()
    with connection:
        assert connection.recv(65_536).startswith(b"GET /health HTTP/1.1\r\n")
        connection.sendall(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)


def test_the_unit_starts_the_server_with_flags_that_exist() -> None:
    text = (DEPLOY / "systemd/quire.service").read_text(encoding="utf-8")
    found = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert found is not None
    args = _parser().parse_args(shlex.split(found[1])[1:])
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop is not None
    assert args.drain_seconds < int(stop[1])
    assert args.files_dir.startswith("/var/cache/quire/")


def test_the_unit_makes_a_folder_for_sockets_that_its_group_may_enter() -> None:
    text = (DEPLOY / "systemd/quire.service").read_text(encoding="utf-8")
    assert re.search(r"^RuntimeDirectory=quire\nRuntimeDirectoryMode=0750$", text, re.MULTILINE)


def test_the_unit_reloads_keys_and_keeps_every_cache_in_the_folder_it_may_write() -> None:
    text = (DEPLOY / "systemd/quire.service").read_text(encoding="utf-8")
    assert re.search(r"^ExecReload=/bin/kill -HUP \$MAINPID$", text, re.MULTILINE)
    assert re.search(r"^CacheDirectory=quire$", text, re.MULTILINE)
    assert "ProtectSystem=strict" in text
    variables = dict(
        word.split("=", 1) for line in re.findall(r"^Environment=(.*)$", text, re.M) for word in line.split()
    )
    assert set(variables) == {"QUIRE_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "HOME"}
    assert all(path.startswith("/var/cache/quire") for path in variables.values())


def test_the_image_of_a_gpu_has_the_compiler_that_triton_needs_when_it_runs() -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8")
    last_stage = text.rpartition("\nFROM ")[2]
    assert re.search(r'"\$DEVICE" = gpu.*\n.*install.* gcc libc6-dev', last_stage)
    assert "TRITON_CACHE_DIR=/models/" in last_stage


def test_a_rollout_never_needs_a_volume_of_one_writer_twice() -> None:
    yaml = pytest.importorskip("yaml")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text()))
    volume = next(one for one in documents if one["kind"] == "PersistentVolumeClaim")
    deployment = next(one for one in documents if one["kind"] == "Deployment")
    assert volume["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert deployment["spec"]["replicas"] == 1


def test_a_pod_with_a_read_only_root_keeps_every_cache_in_a_volume() -> None:
    yaml = pytest.importorskip("yaml")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text()))
    (container,) = next(one for one in documents if one["kind"] == "Deployment")["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert {"QUIRE_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "HOME"} <= set(variables)
    assert all(any(path.startswith(mount) for mount in mounts) for path in variables.values())


def test_the_image_starts_the_server_with_flags_that_exist() -> None:
    program, *words = _entry_point()
    assert program == "quire"
    assert _parser().parse_args(words).host == "0.0.0.0"


def test_the_manifest_gives_flags_that_exist_probes_liveness_and_leaves_time_to_drain() -> None:
    yaml = pytest.importorskip("yaml")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text()))
    pod = next(one for one in documents if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = _parser().parse_args([*_entry_point()[1:], *container["args"]])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert args.drain_seconds + pause < pod["terminationGracePeriodSeconds"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("readinessProbe", "startupProbe", "livenessProbe")}
    assert paths == {"readinessProbe": "/ready", "startupProbe": "/ready", "livenessProbe": "/health"}
    (port,) = container["ports"]
    assert port["containerPort"] == args.port


def test_a_pod_keeps_uploads_in_the_volume_and_not_in_memory() -> None:
    yaml = pytest.importorskip("yaml")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text()))
    pod = next(one for one in documents if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = _parser().parse_args([*_entry_point()[1:], *container["args"]])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    assert mounts["/" + args.files_dir.split("/")[1]] in claims


def test_the_files_for_a_ray_cluster_give_flags_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((DEPLOY / "docker/compose-ray.yaml").read_text())
    (command,) = compose["services"]["server"]["command"]
    assert _parser().parse_args(shlex.split(command.partition("exec quire ")[2])).executor == "ray"
    for service in compose["services"].values():  # all of them have the same token
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
    cluster, _ = yaml.safe_load_all((DEPLOY / "kubernetes/quire-ray.yaml").read_text())
    _, container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    args = _parser().parse_args([*_entry_point()[1:], *container["args"]])
    assert (args.executor, args.tensor_parallel_size, args.ray_address) == ("ray", 2, "127.0.0.1:6379")
    assert "--build-arg EXTRAS=server,hub,ray" in (DEPLOY / "docker/compose-ray.yaml").read_text()


def test_the_ray_service_gives_the_application_arguments_that_it_has() -> None:
    yaml = pytest.importorskip("yaml")
    from quire.serving.router.ray_serve import ARGUMENTS, build_app, serve_config

    manifest = yaml.safe_load((DEPLOY / "kubernetes/rayservice.yaml").read_text(encoding="utf-8"))
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == f"{build_app.__module__}:{build_app.__name__}"
    assert application["args"].keys() <= ARGUMENTS.keys()
    assert serve_config([application["args"]["model"], *shlex.split(application["args"]["flags"])]).replicas == 1


def ray_clusters() -> list[dict[str, Any]]:
    """The specs of the Ray clusters that KubeRay starts from the manifests."""
    yaml = pytest.importorskip("yaml")
    cluster, _ = yaml.safe_load_all((DEPLOY / "kubernetes/quire-ray.yaml").read_text())
    service = yaml.safe_load((DEPLOY / "kubernetes/rayservice.yaml").read_text())
    return [cluster["spec"], service["spec"]["rayClusterConfig"]]


def test_worker_pods_that_may_grow_in_number_have_an_autoscaler() -> None:
    for spec in ray_clusters():
        grows = any(group["minReplicas"] < group["maxReplicas"] for group in spec["workerGroupSpecs"])
        assert spec.get("enableInTreeAutoscaling", False) == grows


def test_a_ray_cluster_needs_a_token_and_the_server_beside_its_head_has_it() -> None:
    for spec in ray_clusters():
        assert spec["authOptions"] == {"mode": "token"}
        assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52, 0)  # older versions have no tokens
    _, server = ray_clusters()[0]["headGroupSpec"]["template"]["spec"]["containers"]
    given = {one["name"]: one for one in server["env"]}
    assert given["RAY_AUTH_MODE"]["value"] == "token"
    assert given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "quire", "key": "auth_token"}


def test_clients_reach_the_server_beside_the_head_by_a_service() -> None:
    yaml = pytest.importorskip("yaml")
    cluster, service = yaml.safe_load_all((DEPLOY / "kubernetes/quire-ray.yaml").read_text())
    name = cluster["metadata"]["name"]
    assert service["spec"]["selector"] == {"ray.io/cluster": name, "ray.io/node-type": "head"}
    _, server = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in server["ports"]}


def test_the_image_with_ray_has_what_kuberay_runs_in_its_pods() -> None:
    last_stage = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert re.search(r"\*,ray,\*\).* wget ", last_stage)
    assert "/opt/quire/bin:$PATH' > /etc/profile.d/quire.sh" in last_stage
    for name in ("compose-ray.yaml", "../kubernetes/quire-ray.yaml", "../kubernetes/rayservice.yaml"):
        text = (DEPLOY / "docker" / name).read_text(encoding="utf-8")
        assert "--build-arg EXTRAS=server,hub,ray -t quire:ray ." in text
        assert set(re.findall(r"image: (\S+)", text)) == {"quire:ray"}
