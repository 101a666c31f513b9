"""What every command has in common."""

from __future__ import annotations

import tomllib
from pathlib import Path

from typer.testing import CliRunner

from baton.cli.commands import app

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_the_version_is_the_projects():
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0
    assert shown.output == f"baton {tomllib.loads(PROJECT.read_text())['project']['version']}\n"


def test_without_a_command_the_commands_are_listed():
    shown = CliRunner().invoke(app, [])
    assert "Serves large language models over gRPC" in shown.output
    for command in ("up", "chat", "generate", "status", "plan", "eval", "simulate"):
        assert f"  {command} " in shown.output
