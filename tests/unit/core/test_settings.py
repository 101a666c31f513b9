from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from baton.core.errors import StartupError
from baton.core.settings import (
    ComponentSettings,
    EngineSettings,
    ModelSettings,
    RedisSettings,
    Section,
    ServerSettings,
    TelemetrySettings,
    redact,
)


class Limits(Section):
    """Limits of the front door."""

    max_waiting: int = Field(default=10, ge=1, description="Most requests that wait")


class FrontSettings(ComponentSettings):
    """The front door."""

    class_name: ClassVar[str] = "gateway"

    model: ModelSettings
    redis: RedisSettings = RedisSettings()
    server: ServerSettings = ServerSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    engine: EngineSettings = EngineSettings()
    limits: Limits = Limits()
    classes: dict[str, Limits] = Field(default={"chat": Limits()}, description="Queues by name")
    quick: bool = Field(default=False, description="Skips the warm-up")


MODEL = ["--model.path", "/models/tiny"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("BATON_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> list[str]:
        file = tmp_path / "baton.yaml"
        file.write_text(text)
        return ["--config", str(file)]

    return write_file


def fault(argv: list[str]) -> str:
    with pytest.raises(StartupError) as caught:
        FrontSettings.load(argv)
    message = str(caught.value)
    assert "\n" not in message
    assert (
        caught.value.__context__ is None or caught.value.__suppress_context__
    )  # a traceback would show the value that the line hides
    return message


def test_defaults_and_the_name_of_the_folder() -> None:
    settings = FrontSettings.load(MODEL)
    assert settings.model == ModelSettings(path=Path("/models/tiny"), name="tiny")
    assert settings.redis.url == "redis://127.0.0.1:6379/0"
    assert settings.server.max_message_bytes == 4 * 1024 * 1024
    assert settings.engine.kv_cache_bytes is None
    assert settings.engine.num_threads >= 1


def test_flags_win_over_environment_over_file_over_defaults(write, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(
        """
        model: {path: /models/file}
        server: {port: 1, host: shared, drain_grace_s: 1}
        gateway: {server: {port: 2, host: own}}
        decode_worker: {anything: goes here}
        """
    )
    settings = FrontSettings.load(config)
    assert (settings.server.port, settings.server.host, settings.server.drain_grace_s) == (2, "own", 1.0)
    monkeypatch.setenv("BATON_SERVER__PORT", "3")
    assert FrontSettings.load(config).server.port == 3
    monkeypatch.setenv("BATON_GATEWAY__SERVER__PORT", "4")
    assert FrontSettings.load(config).server.port == 4
    assert FrontSettings.load([*config, "--server.port=5"]).server.port == 5
    assert FrontSettings.load([*config, "--server.port=5"]).server.host == "own"


def test_an_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TELEMETRY__OTLP_ENDPOINT", "")
    assert FrontSettings.load(MODEL).telemetry.otlp_endpoint is None


def test_values_are_read_in_their_own_form() -> None:
    argv = ["--engine.kv_cache_bytes", "512MiB", "--quick", "--classes", '{"long": {"max_waiting": 3}}']
    settings = FrontSettings.load([*MODEL, *argv])
    assert settings.engine.kv_cache_bytes == 512 * 1024**2
    assert settings.quick
    assert settings.classes == {"long": Limits(max_waiting=3)}


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        ("server.port", "65536", "65535"),
        ("server.port", "-1", "0"),
        ("server.port", "many", "integer"),
        ("server.drain_grace_s", "nan", "finite"),
        ("server.max_message_bytes", "1", "1024"),
        ("redis.socket_timeout_s", "0", "0"),
        ("redis.namespace", "a b", "A-Za-z0-9"),
        ("redis.url", "http://h", "redis://"),
        ("redis.url", "redis://h:99999", "65535"),
        ("telemetry.otlp_endpoint", "collector:4317", "http://"),
        ("telemetry.trace_sample_ratio", "1.5", "1"),
        ("telemetry.log_level", "loud", "debug"),
        ("engine.dtype", "float8", "bfloat16"),
        ("engine.device", "tpu", "cpu"),
        ("engine.block_size", "0", "1"),
        ("engine.kv_cache_bytes", "12QiB", "QiB"),
        ("model.name", "a/b", "A-Za-z0-9"),
        ("model.max_context_tokens", "1", "2"),
        ("limits.max_waiting", "0", "1"),
    ],
)
def test_a_bad_flag_is_named_with_value_limit_and_place(flag: str, value: str, limit: str) -> None:
    message = fault([*MODEL, f"--{flag}={value}"])
    assert message.startswith(f"{flag}: ")
    assert repr(value) in message
    assert limit in message
    assert message.endswith(f"(flag --{flag})")


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_SERVER__PORT", "70000")
    assert fault(MODEL) == (
        "server.port: should be less than or equal to 65535, got '70000' (environment variable BATON_SERVER__PORT)"
    )


def test_a_bad_entry_of_the_file_is_named(write) -> None:
    config = write("gateway: {classes: {chat: {max_waiting: 0}}}\nserver: {port: 70000}")
    message = fault([*MODEL, *config])
    assert "server.port: should be less than or equal to 65535, got '70000'" in message
    assert f"({config[1]}: server.port)" in message
    assert "classes.chat.max_waiting: should be greater than or equal to 1, got '0'" in message
    assert f"({config[1]}: gateway.classes.chat.max_waiting)" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("redsi: {url: x}", "redsi: no such section"),
        ("redis: {ulr: x}", "redis.ulr: no such setting"),
        ("gateway: {limit: x}", "limit: no such setting"),
        ("redis: redis://u:hunter2@h", "redis: must be a mapping"),
        ("- a", "must be a mapping of model"),
        ("redis: {url: redis://u:hunter2@h\n - [", "line 2"),
    ],
)
def test_a_file_that_is_not_understood(write, text: str, said: str) -> None:
    message = fault([*MODEL, *write(text)])
    assert said in message
    assert "baton.yaml" in message
    assert "hunter2" not in message


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    assert fault(["--config", "/nonexistent.yaml"]) == (
        "--config: cannot read /nonexistent.yaml: No such file or directory"
    )
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in fault(["--config", str(tmp_path / "x")])


def test_flags_that_do_not_exist_and_values_that_are_missing() -> None:
    assert fault([*MODEL, "--server.prot=3"]) == "no such flag: --server.prot; --help lists all"
    assert fault([*MODEL, "--server.por", "3"]) == "no such flag: --server.por; --help lists all"
    assert fault([*MODEL, "--server.port"]) == "--server.port: expected one argument"
    assert "model.path: must be set, with --model.path or BATON_MODEL__PATH or in the YAML file" in fault([])


def test_variables_that_mean_to_be_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_GATEWAY_PORT", "tcp://10.0.0.1:80")  # set by orchestrators
    monkeypatch.setenv("BATON_DECODE_WORKER__SERVER__PORT", "1")
    monkeypatch.setenv("BATON_LEASE__LEASE_S", "1")
    FrontSettings.load(MODEL)
    monkeypatch.setenv("BATON_REDSI__URL", "x")
    assert fault(MODEL) == (
        "redsi: no such section (environment variable BATON_REDSI__URL); the closest is BATON_REDIS__URL"
    )
    monkeypatch.delenv("BATON_REDSI__URL")
    monkeypatch.setenv("BATON_GATEWAY__SEVER__PORT", "1")
    assert fault(MODEL) == (
        "sever: no such setting (environment variable BATON_GATEWAY__SEVER__PORT);"
        " the closest is BATON_GATEWAY__SERVER__PORT"
    )
    monkeypatch.delenv("BATON_GATEWAY__SEVER__PORT")
    monkeypatch.setenv("BATON_REDIS__ULR", "x")
    assert fault(MODEL) == (
        "redis.ulr: no such setting (environment variable BATON_REDIS__ULR);"
        " the closest is environment variable BATON_REDIS__URL"
    )
    monkeypatch.delenv("BATON_REDIS__ULR")
    monkeypatch.setenv("BATON_SERVER", '{"port": ')
    assert fault(MODEL) == "server: must be JSON (environment variable BATON_SERVER)"


@pytest.mark.parametrize(
    ("name", "value", "closest"),
    [
        ("BATON_SERVER_PORT", "9000", "BATON_SERVER__PORT"),
        ("BATON_ENGINE_DTYPE", "float32", "BATON_ENGINE__DTYPE"),
        ("BATON_LEASE_LEASE_S", "3", "BATON_LEASE__LEASE_S"),
        ("BATON_QUIK", "1", "BATON_QUICK"),
        ("baton_quik", "1", "BATON_QUICK"),
        ("BATON_GATEWAY__QUIK", "1", "BATON_GATEWAY__QUICK"),
        ("BATON_GATEWAY", "{}", ""),
        ("BATON_DECODE_WORKER", "{}", ""),
        ("BATON_HOME", "/x", ""),
    ],
)
def test_no_variable_of_ours_is_ignored(name: str, value: str, closest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    message = fault(MODEL)
    assert name in message
    assert message.endswith(f"the closest is {closest}" if closest else "--help lists all settings")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATON_PORT", "tcp://10.0.0.1:8470"),
        ("BATON_SERVER_PORT", "tcp://10.0.0.1:8470"),
        ("BATON_SERVER_SERVICE_HOST", "10.0.0.1"),
        ("BATON_SERVICE_PORT_GRPC", "8470"),
        ("BATON_GATEWAY_PORT_8470_TCP", "tcp://10.0.0.1:8470"),
        ("BATON_GATEWAY_PORT_8470_TCP_ADDR", "10.0.0.1"),
        ("BATON_WORKER_ID", "d1"),
        ("BATON_QUEUE__CLASSES__CHAT__MAX_WAITING", "3"),
    ],
)
def test_what_orchestrators_and_other_components_set_passes(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    FrontSettings.load(MODEL)


def test_whether_a_setting_is_named(write, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not FrontSettings.is_named([], "model", "path")
    assert FrontSettings.is_named(MODEL, "model", "path")
    assert FrontSettings.is_named(write("gateway: {model: {path: /m}}"), "model", "path")
    assert not FrontSettings.is_named(write("decode_worker: {model: {path: /m}}"), "model", "path")
    monkeypatch.setenv("BATON_MODEL__PATH", "/m")
    assert FrontSettings.is_named([], "model", "path")


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@h",
        "redis://:hunter2@h:99999",
        "redis://u:hun/ter2hunter2@h:1/0:x",
        "user:hunter2@h",
        "http://h?password=hunter2&db=1",
    ],
)
def test_passwords_are_never_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_REDIS__URL", url)
    message = fault(MODEL)
    assert message.startswith("redis.url: ")
    assert "hunter2" not in message


def test_a_good_password_is_in_no_text() -> None:
    settings = FrontSettings.load([*MODEL, "--redis.url", "redis://u:hunter2@h:6379/0"])
    assert settings.redis.url == "redis://u:hunter2@h:6379/0"
    assert "hunter2" not in f"{settings!r} {settings}"
    assert settings.redis.redacted_url == "redis://***@h:6379/0"
    assert redact("redis://h:6379/0") == "redis://h:6379/0"


def test_help_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        FrontSettings.load(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    sections = {name: field.annotation for name, field in FrontSettings.model_fields.items()}
    for name, section in sections.items():
        if isinstance(section, type) and issubclass(section, Section):
            for field, info in section.model_fields.items():
                assert f"--{name}.{field} " in shown
                assert info.description
    assert "--config FILE" in shown
    assert "(default: 127.0.0.1)" in shown


def test_construction_reads_nothing_and_settings_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_SERVER__PORT", "9")
    settings = FrontSettings(model=ModelSettings(path=Path("/m/x")))
    assert settings.server.port == 0
    with pytest.raises(ValidationError):
        settings.quick = True  # type: ignore[misc]
    with pytest.raises(ValidationError):
        settings.server.port = 1  # type: ignore[misc]
