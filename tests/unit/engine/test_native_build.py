"""Kernels are compiled once, and a machine that cannot compile them says so and goes on."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.native import build as module
from baton.engine.native.build import build, cache_folder, compiler
from baton.engine.native.library import open_library

# What compiles with these compiles with -O3, three times as slowly.
QUICK_FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in module.FLAGS)
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that logs its calls beside itself and writes its output; it fails when `broken` is there."""
    tool = tmp_path / "tools" / "gcc"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n"
        'cd "$(dirname "$0")"; echo "$@" >> calls\n'
        'if [ "$1" = --version ]; then cat version; exit; fi\n'
        "if [ -e broken ]; then echo 'error: no such instruction' >&2; exit 1; fi\n"
        'while [ "$1" != -o ]; do shift; done; echo made > "$2"\n'
    )
    tool.chmod(0o755)
    (tool.parent / "version").write_text("1.0")
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    return tool.parent


def compilations(fake_compiler: Path) -> int:
    return sum("--version" not in line for line in (fake_compiler / "calls").read_text().splitlines())


def test_a_library_is_compiled_once(fake_compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = build(cache)
    assert first is not None
    assert first.read_text() == "made\n"
    assert build(cache) == first
    assert compilations(fake_compiler) == 1
    assert [path.name for path in cache.iterdir()] == [first.name]
    assert cache.stat().st_mode & 0o077 == 0


def test_another_compiler_or_instruction_set_has_its_own(fake_compiler: Path, tmp_path: Path) -> None:
    paths = {build(tmp_path / "cache"), build(tmp_path / "cache", machine="-march=x86-64")}
    (fake_compiler / "version").write_text("2.0")
    paths.add(build(tmp_path / "cache"))
    assert len(paths - {None}) == 3


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64 compilers")
@pytest.mark.parametrize(
    "machine", ["-march=sandybridge", "-march=x86-64-v3", "-march=skylake-avx512", "-march=sapphirerapids"]
)
def test_it_compiles_for_processors_that_are_not_this_one(
    tmp_path: Path, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLAGS", QUICK_FLAGS)
    assert build(tmp_path / "cache", machine=machine) is not None


def test_another_processor_has_its_own(fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path / "cache")
    monkeypatch.setattr(module, "_cpu", lambda: b"flags: another")
    assert build(tmp_path / "cache") != first


def test_no_compiler_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler() is None
    assert build(tmp_path / "cache") is None
    assert [record.message for record in caplog.records] == [
        "no C compiler (gcc, cc, clang): steps run on PyTorch's kernels, slower"
    ]


def test_a_failing_compiler_is_told_in_one_line_and_leaves_nothing(
    fake_compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (fake_compiler / "broken").touch()
    assert build(tmp_path / "cache") is None
    assert [record.message for record in caplog.records] == [
        "the kernels cannot be built, PyTorch's run instead, slower: error: no such instruction"
    ]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_told(
    fake_compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert build(tmp_path / "file") is None
    assert "cannot be built" in caplog.text


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "baton"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "baton"


@needs_compiler
def test_processes_that_start_at_once_get_one_sound_library(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from baton.engine.native import build as module;"
        f"module.FLAGS = {QUICK_FLAGS}; print(module.build(Path(sys.argv[1])))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    (path,) = printed
    assert [each.name for each in tmp_path.iterdir()] == [Path(path).name]
    # An order of elements that every type and width has: whole blocks follow one another.
    library = open_library(Path(path))
    assert library.baton_padded(1) == library.baton_place(1, library.baton_padded(1))
