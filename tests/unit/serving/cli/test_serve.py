"""From the flags of `quire serve` to one ServerConfig."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from quire.config.arguments import EngineArguments
from quire.config.keys import KeySources
from quire.config.server import ListenConfig, ServerConfig, TimeoutConfig
from quire.runtime.loading.catalogue import DEFAULT
from quire.serving import cli
from quire.serving.cli import _parser, main
from quire.serving.cli import serve as serve_module
from quire.serving.cli.serve import server_config
from quire.serving.process import spawning
from quire.serving.process.spawning import Spawned
from quire.serving.process.supervisor import warn_of_useless
from quire.types.errors import ConfigError

DECODES = ("--kv-role", "decode", "--kv-transport", "shm://kv")


def config(*flags: str) -> ServerConfig:
    return server_config(_parser().parse_args(["serve", *flags]))[0]


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(autouse=True)
def _no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "QUIRE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_a_folder_of_adapters_without_an_admin_key_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("--enable-lora", "--lora-dir", str(tmp_path))
    warn_of_useless(config(*flags, "--admin-key", "a-long-enough-key-of-an-admin"))
    warn_of_useless(config("--enable-lora"))
    assert caplog.messages == []
    warn_of_useless(config(*flags))
    (message,) = caplog.messages
    assert message.startswith("lora_dir: has no effect without an admin key")


def test_without_flags_the_default_model_is_served_on_the_loopback_to_anyone_there() -> None:
    made = config()
    assert made == ServerConfig(source=made.source, engine=EngineArguments())
    assert made.source.model == DEFAULT
    assert (made.host, made.port, made.access.key_digests, made.access.admin_digests) == ("127.0.0.1", 8000, (), ())


def test_defaults_for_templates_and_usage_become_settings() -> None:
    made = config("--default-chat-template-kwargs", '{"enable_thinking": false}', "--enable-force-include-usage")
    assert (made.source.chat_template_kwargs, made.force_include_usage) == ({"enable_thinking": False}, True)
    assert (config().source.chat_template_kwargs, config().force_include_usage) == ({}, False)
    with pytest.raises(ConfigError, match="default_chat_template_kwargs: 'not a name' is not a valid name"):
        config("--default-chat-template-kwargs", '{"not a name": 1}')


def test_flags_become_settings(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    made = config(
        *("m.gguf", "--port", "0", "--api-workers", "3", "--strict", "--drain-seconds", "5", "--step-timeout", "9"),
        *("--sleep-idle-seconds", "600"),
        *("--served-model-name", "a", "--served-model-name", "b", "--chat-template", str(template)),
        *("--limit", "n=16", "--limit", "queue_requests=9", "--cors-origin", "https://example.org"),
        *("--no-playground", "--open-metrics", "--log-level", "debug", "--log-format", "json"),
        *("--max-num-seqs", "8", "--dtype", "float32", "--scheduling-policy", "priority", "--seed", "5"),
    )
    assert made.source.model == "m.gguf"
    assert made.source.served_names == ("a", "b")
    assert made.source.chat_template == "{{ messages }}"
    assert made.engine == EngineArguments(max_num_seqs=8, dtype="float32", scheduling_policy="priority", seed=5)
    assert (made.api_workers, made.strict, made.drain_seconds, made.step_timeout) == (3, True, 5.0, 9.0)
    assert made.sleep_idle_seconds == 600.0
    assert made.limits == {"n": 16, "queue_requests": 9}
    assert made.access.cors_origins == ("https://example.org",)
    assert not made.access.playground
    assert not made.access.metrics_need_key
    assert (made.log_level, made.log_format) == ("debug", "json")


@pytest.mark.parametrize(
    ("flags", "model", "names"),
    [
        (["m.gguf", "--served-model-name", "a", "b"], "m.gguf", ("a", "b")),
        (["--model", "m.gguf", "--served-model-name", "a", "b", "--port", "0"], "m.gguf", ("a", "b")),
        (["--served-model-name", "a", "b", "-m", "m.gguf"], "m.gguf", ("a", "b")),
        (["--served-model-name", "a", "m.gguf"], "m.gguf", ("a",)),
        (["m.gguf", "--served-model-name", "a", "b", "--served-model-name", "c", "a"], "m.gguf", ("a", "b", "c")),
    ],
)
def test_one_flag_takes_several_served_names(flags: list[str], model: str, names: tuple[str, ...]) -> None:
    source = config(*flags).source
    assert (source.model, source.served_names) == (model, names)


def test_keys_come_from_flags_a_file_and_the_environment_and_only_their_digests_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsecond-key\n\nthird-key\n")
    monkeypatch.setenv("QUIRE_API_KEY", "fourth-key")
    made = config("--api-key", "first-key", "--api-key-file", str(file), "--host", "0.0.0.0")
    keys = ("first-key", "fourth-key", "second-key", "third-key")
    assert made.access.key_digests == tuple(map(digest, keys))
    assert "first-key" not in repr(made)


def test_an_admin_key_is_made_when_none_is_given() -> None:
    made, keys = server_config(_parser().parse_args(["serve", "--admin"]))
    assert keys.made_admin_key is not None
    assert len(keys.made_admin_key) >= 32
    assert made.access.admin_digests == (digest(keys.made_admin_key),)
    assert keys.made_admin_key not in repr(keys)
    made, keys = server_config(_parser().parse_args(["serve", "--admin", "--admin-key", "mine-alone"]))
    assert keys.made_admin_key is None
    assert made.access.admin_digests == (digest("mine-alone"),)


def test_admin_keys_come_from_a_file_and_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("in-file\n")
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "in-environment")
    made = config("--admin-key-file", str(file))
    assert made.access.admin_digests == (digest("in-environment"), digest("in-file"))


def test_the_admin_key_is_shown_only_on_request(tmp_path: Path) -> None:
    def shown(*flags: str) -> str | None:
        args = _parser().parse_args(["serve", *flags])
        return serve_module._shown_key(args, server_config(args)[1])

    file = tmp_path / "keys"
    file.write_text("in-file\n")
    assert shown("--admin") is None
    assert shown("--admin-key", "mine-alone") is None
    assert shown("--admin-key", "mine-alone", "--show-admin-key") == "mine-alone"
    assert shown("--admin-key-file", str(file), "--show-admin-key") == "in-file"
    assert len(shown("--admin", "--show-admin-key") or "") >= 32
    with pytest.raises(ConfigError, match="show_admin_key: there is no admin key; add --admin"):
        shown("--show-admin-key")


def test_keys_are_read_again_from_their_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old-key\n")
    _, keys = server_config(_parser().parse_args(["serve", "--api-key-file", str(file), "--api-key", "fixed"]))
    file.write_text("new-key\n")
    assert keys.digests() == ((digest("fixed"), digest("new-key")), (), ())


def test_listening_and_time_are_settings() -> None:
    made = config(
        *("--uds", "/run/quire/api.sock", "--admin", "--admin-port", "9000", "--root-path", "/llm/", "--access-log"),
        *("--request-timeout", "60", "--queue-timeout", "5"),
    )
    assert made.listen == ListenConfig(uds="/run/quire/api.sock", admin_port=9000, root_path="/llm")
    assert made.timeouts == TimeoutConfig(request=60.0, queue=5.0)
    assert made.access_log


def test_a_terminal_shows_warnings_only_unless_more_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config().log_level == "info"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert config().log_level == "warning"
    assert config("--log-format", "json").log_level == "info"
    assert config("--log-level", "info").log_level == "info"


def test_a_unix_socket_needs_no_api_key_whatever_the_host() -> None:
    assert config("--uds", "/run/quire.sock", "--host", "0.0.0.0").listen.uds == "/run/quire.sock"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.5.5", "::1", "localhost"])
def test_the_loopback_needs_no_key(host: str) -> None:
    assert config("--host", host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_any_other_address_needs_one(host: str) -> None:
    with pytest.raises(ConfigError, match="host: .*add --api-key-file FILE or set QUIRE_API_KEY, or use 127.0.0.1"):
        config("--host", host)
    assert config("--host", host, "--api-key", "some-key").host == host


def test_a_template_that_cannot_work_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template: .*bad\.jinja does not work: .* line 1"):
        config("--chat-template", str(tmp_path / "bad.jinja"))


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--api-key", ""], "api_key: is empty"),
        (["--api-key", "  "], "api_key: is empty"),
        (["--api-key", "with space"], "api_key: must be"),
        (["--api-key", "k" * 513], "api_key: must be"),
        (["--admin-key", ""], "admin_key: is empty"),
        (["--api-key", "same-key", "--admin-key", "same-key"], "admin_key: is also an API key"),
        (["--api-key-file", "/no/such/file"], "api_key_file: /no/such/file cannot be read"),
        (["--api-key-file", "/dev/null"], "api_key_file: /dev/null holds no key"),
        (["--port", "70000"], "port: must be in"),
        (["--admin-key-file", "/dev/null"], "admin_key_file: /dev/null holds no key"),
        (["--admin-port", "9000"], "admin_port: there is no admin key"),
        (["--admin-uds", "a.sock"], "admin_uds: there is no admin key"),
        (["--admin", "--admin-port", "70000"], "admin_port: must be in"),
        (["--admin", "--admin-port", "1", "--admin-host", "0.0.0.0"], "admin_host: 0.0.0.0 can be reached"),
        (["--admin", "--admin-port", "1", "--admin-uds", "a"], "admin_uds: cannot be given together"),
        (["--admin", "--uds", "a", "--admin-uds", "a"], "admin_uds: is the same path as uds"),
        (["--uds", "/" + "x" * 120], "uds: must be a path of 1 to 100 bytes"),
        (["--ssl-keyfile", "k.pem"], "ssl_keyfile: needs a certificate"),
        (["--ssl-certfile", "/no/such.pem"], "ssl_certfile: /no/such.pem cannot be read"),
        (["--ssl-certfile", "/dev/null"], "ssl_certfile: /dev/null cannot be used"),
        (["--ssl-certfile", "/dev/null", "--uds", "a"], "ssl_certfile: is for TCP"),
        (["--root-path", "llm"], "root_path: 'llm' is not a path"),
        (["--root-path", "/a/../b"], "root_path: '/a/../b' is not a path"),
        (["--request-timeout", "0"], "request_timeout: must be"),
        (["--queue-timeout", "-1"], "queue_timeout: must be"),
        (["--api-workers", "0"], "api_workers: must be in"),
        (["--drain-seconds", "-1"], "drain_seconds: must be 0 or more, in seconds, got -1; give"),
        (["--step-timeout", "0"], "step_timeout: must be above 0, in seconds, got 0; give"),
        (["--step-timeout", "nan"], "step_timeout: must be"),
        (["--sleep-idle-seconds", "0"], "sleep_idle_seconds: must be above 0, in seconds, got 0; give"),
        (["--sleep-idle-seconds", "9", "--record", "a"], "sleep_idle_seconds: cannot be given together with record"),
        (["--limit", "n"], "limit: 'n' is not NAME=VALUE"),
        (["--limit", "n=many"], "limit: 'n=many' is not NAME=VALUE"),
        (["--limit", "nothing=1"], "there is no such limit"),
        (["--limit", "n=0"], "limit n: must be a whole number in"),
        (["--cors-origin", "example.org"], "cors_origin: 'example.org' is not an origin"),
        (["--cors-origin", "https://example.org/path"], "cors_origin:"),
        (["--served-model-name", " "], "served_model_name: is empty"),
        (["--chat-template", "/dev/null"], "chat_template: /dev/null is empty"),
        (["--trace-endpoint", "collector:4318"], "trace_endpoint: 'collector:4318' is not a URL"),
        (["--trace-endpoint", "http://[::1:4318"], "trace_endpoint: 'http://[::1:4318' is not a URL"),
        (["--cors-origin", "http://[::1"], "cors_origin: 'http://[::1' is not an origin"),
        ([*DECODES, "--prefill-url", "http://[::1:1"], "prefill_url: 'http://[::1:1' is not the URL of a server"),
        ([*DECODES, "--prefill-url", "http://a:0"], "prefill_url: 'http://a:0' is not the URL of a server"),
        ([*DECODES, "--prefill-url", "http://a..b"], "prefill_url: 'http://a..b' is not the URL of a server"),
        (["a.gguf", "--model", "b.gguf"], "model: is given twice"),
        (["--policy-config", '{"tpot": NaN}', "--policy", "deadline"], "policy_config: tpot must be above 0"),
        (
            ["--attention-backend", "foo"],
            "attention_backend: 'foo' is unknown; choose one of auto, triton, native, flashinfer, gather, reference",
        ),
        (["--attention-backend", "virtual"], 'set kv_layout="virtual" instead'),
        (["--host-cache-memory", "lots"], "host_cache_memory: 'lots' is not a size"),
        (["--no-enable-prefix-caching", "--policy", "lpm"], "policy: 'lpm' orders requests by their cached prefixes"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(flags: list[str], cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*flags)
    assert cause in str(caught.value)
    assert "same-key" not in str(caught.value)


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "")
    with pytest.raises(ConfigError, match="QUIRE_API_KEY: is empty"):
        config()


def test_missing_packages_are_named_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "zmq" else object())
    assert main(["serve"]) == 2
    fix = "run pip install -c constraints.txt '.[server]' in a checkout of Quire"
    assert capsys.readouterr().err == f"quire: error: serve: needs zmq; {fix}\n"


def test_an_engine_setting_that_no_model_could_have_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.serving.process import supervisor

    monkeypatch.setattr(supervisor, "Supervisor", None)
    assert main(["serve", "--preemption", "swap"]) == 2
    assert capsys.readouterr().err.startswith('quire: error: preemption: "swap" needs host memory; set')


def test_the_supervisor_gets_the_configuration_and_its_exit_code_is_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quire.serving.process import supervisor

    seen: list[tuple[ServerConfig, str | None]] = []
    engines: list[Spawned | None] = []

    class Fake:
        def __init__(
            self, config: ServerConfig, *, keys: KeySources, admin_key: str | None, engine: Spawned | None
        ) -> None:
            seen.append((config, admin_key))
            engines.append(engine)

        def run(self) -> int:
            return 7

    monkeypatch.setattr(supervisor, "Supervisor", Fake)
    assert main(["serve", "--port", "9"]) == 7
    assert seen == [(config("--port", "9"), None)]
    assert serve_module.MAX_WORKERS >= 64
    (engine,) = engines
    assert engine is not None
    assert engine.process.poll() == -signal.SIGKILL  # it was left to itself


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Spawned]:
    """The processes that a test starts ahead."""
    found: list[Spawned] = []
    real = spawning.spawn

    def spawn(module: str) -> Spawned:
        found.append(real(module))
        return found[-1]

    monkeypatch.setattr(spawning, "spawn", spawn)
    return found


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (["serve", "--no-such-flag"], True),
        (["serve", "--help"], False),
        (["serve", "--replicas=2", "--no-such-flag"], False),
        (["doctor", "--no-such-flag"], False),
    ],
)
def test_an_engine_process_started_ahead_ends_with_the_command(
    words: list[str], starts: bool, started: list[Spawned]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert len(started) == starts
    assert all(engine.process.poll() is not None for engine in started)


def test_ctrl_c_while_flags_are_read_ends_the_command_and_its_engine_without_a_traceback(
    started: list[Spawned], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_parser", interrupt)
    assert main(["serve"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "\n"
    assert started[0].process.poll() == -signal.SIGKILL


def test_a_server_of_replicas_keeps_no_engine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.serving.router import replicated

    class Fake:
        def __init__(self, config: ServerConfig, **_: object) -> None:
            assert config.replicas == 2

        def run(self) -> int:
            return engine.process.wait(30)

    monkeypatch.setattr(replicated, "ReplicatedServer", Fake)
    args = _parser().parse_args(["serve", "--replicas", "2"])
    with spawning.spawned_engine() as engine:
        assert serve_module.run_serve(args, engine) == -signal.SIGKILL


def test_a_command_goes_on_where_no_process_can_be_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    engines: list[object] = []
    monkeypatch.setattr(spawning.subprocess, "Popen", refuse)
    monkeypatch.setattr(cli, "_run", lambda _, engine: engines.append(engine) or 0)
    assert main(["serve"]) == 0
    assert engines == [None]
