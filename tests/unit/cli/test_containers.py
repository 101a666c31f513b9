"""The container files say what the settings understand."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from decode_worker.settings import DecodeWorkerSettings
from gateway.settings import GatewaySettings
from prefill_worker.settings import PrefillWorkerSettings

if TYPE_CHECKING:
    from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = {kind.class_name: kind for kind in (GatewaySettings, PrefillWorkerSettings, DecodeWorkerSettings)}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture
def load(compose, monkeypatch):
    """Loads a component's settings from the environment of its service alone."""

    def load(component: str):
        for name, value in compose["services"][component]["environment"].items():
            monkeypatch.setenv(name, value)
        return SETTINGS[component].load([])

    return load


@pytest.mark.parametrize("component", SETTINGS)
def test_every_variable_is_a_setting(compose, load, component):
    settings = load(component)
    for variable in compose["services"][component]["environment"]:
        path = variable.removeprefix("BATON_").lower().split("__")
        if path[0] == component:
            path = path[1:]
        section: BaseModel = settings
        for part in path[:-1]:
            section = getattr(section, part)
        assert path[-1] in section.model_fields_set, variable


@pytest.mark.parametrize("component", SETTINGS)
def test_command_and_addresses(compose, load, component):
    service, settings = compose["services"][component], load(component)
    assert service["command"] == ["python", "-m", component]
    assert settings.server.host == "0.0.0.0"
    if component == "gateway":
        assert service["ports"] == [f"127.0.0.1:{settings.server.port}:{settings.server.port}"]
    else:
        assert settings.server.advertise_host == component
    assert "redis" in compose["services"]
    assert settings.redis.url == "redis://redis:6379/0"
    assert float(service["stop_grace_period"].removesuffix("s")) > settings.server.drain_grace_s


def test_the_pool_fits_the_shared_memory_that_both_workers_see(compose, load):
    options = compose["volumes"]["shared-memory"]["driver_opts"]
    size = next(option for option in options["o"].split(",") if option.startswith("size="))
    assert size == "size=2g"
    assert load("prefill_worker").engine.kv_cache_bytes < 2 * 1024**3
    for worker in ("prefill_worker", "decode_worker"):
        assert "shared-memory:/dev/shm" in compose["services"][worker]["volumes"]


def test_the_image_takes_everything_that_it_installs():
    """What the Dockerfile copies is what .dockerignore lets through; each package must be among it."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.removesuffix("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= allowed
    assert {"pyproject.toml", "constraints.txt", "README.md", "scripts"} <= allowed
    assert all((ROOT / name).exists() for name in allowed)
