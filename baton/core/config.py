"""How a component's settings are put together: flags over environment over YAML file over defaults.

Nothing is read when settings are constructed; `ComponentSettings.load` reads, once, and refuses what it does not
understand in one line that names the setting, the bad value, the limit and the place it came from.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from baton.core.errors import StartupError
from baton.core.known_settings import COMPONENTS, PREFIX, SHARED_SECTIONS, check_environment, nearest

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_MAX_SHOWN_CHARS = 80


class ComponentSettings(BaseSettings):
    """Base of each component's settings. Subclasses set `class_name` and add fields, most of them sections.

    Construction reads neither environment nor files; `load` does.
    """

    class_name: ClassVar[str]

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        cli_exit_on_error=False,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_use_class_docs_for_groups=True,
        cli_implicit_flags=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Construction takes what it is given and nothing else."""
        return (init_settings,)

    @classmethod
    def load(cls, argv: Sequence[str]) -> Self:
        """Settings from flags (`argv`, without the program's name), environment and the file that `--config` names.

        `--help` prints every setting and raises SystemExit(0). StartupError on anything else that is wrong. Blocks
        for one small file.
        """
        try:
            sources = list(_sources(cls, argv))
        except SettingsError as error:
            raise StartupError(_describe_unparsed(error)) from None
        # A required section that nobody mentions is there, empty: the error then names the setting that it lacks.
        values: dict[str, Any] = {name: {} for name, field in cls.model_fields.items() if _is_required_section(field)}
        for source in reversed(sources):
            values = _merge(values, source.values)
        try:
            return cls(**values)
        except ValidationError as error:
            raise StartupError(_describe(cls, error, sources)) from None

    @classmethod
    def is_named(cls, argv: Sequence[str], *path: str) -> bool:
        """Whether a flag, the environment or the file sets the setting at `path`. StartupError and blocks as `load`."""
        try:
            return any(source.holds(path) for source in _sources(cls, argv))
        except SettingsError as error:
            raise StartupError(_describe_unparsed(error)) from None


@dataclass(frozen=True, slots=True)
class _Source:
    """Values from one place, and how that place spells a setting."""

    values: Mapping[str, Any]
    label: str
    separator: str
    upper: bool = False

    def spell(self, path: Sequence[str]) -> str:
        joined = self.separator.join(path)
        return self.label + (joined.upper() if self.upper else joined)

    def holds(self, path: Sequence[str]) -> bool:
        node: Any = self.values
        for part in path:
            if isinstance(node, Mapping) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                return False
        return True


def _sources(cls: type[ComponentSettings], argv: Sequence[str]) -> Iterator[_Source]:
    """The sources, strongest first."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {cls.class_name}",
        description=(
            f"{(cls.__doc__ or '').strip()} Each setting is a flag, an environment variable ({PREFIX}SERVER__PORT for "
            "server.port) or an entry of the YAML file; flags win over the environment, the environment over the file."
        ),
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    flags: CliSettingsSource[Any] = CliSettingsSource(
        cls, root_parser=parser, parse_args_method=_parse_args, cli_parse_args=list(argv)
    )
    yield _Source(flags(), "flag --", ".")
    check_environment(cls, cls.class_name, os.environ)
    own_prefix = f"{PREFIX}{cls.class_name.upper()}__"
    for prefix in (own_prefix, PREFIX):
        yield _Source(
            EnvSettingsSource(cls, env_prefix=prefix)(), f"environment variable {prefix}", separator="__", upper=True
        )
    if file := _config_file(argv):
        document = _read_yaml(file)
        yield _Source(document.pop(cls.class_name, {}), f"{file}: {cls.class_name}.", ".")
        yield _Source({key: document[key] for key in document if key in cls.model_fields}, f"{file}: ", ".")


def _parse_args(parser: argparse.ArgumentParser, args: Sequence[str]) -> argparse.Namespace:
    """Parses without argparse's habit of printing its usage and exiting on an error."""
    try:
        namespace, unknown = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise SettingsError(str(error)) from None
    if unknown:
        raise SettingsError(f"no such flag: {redact(unknown[0].partition('=')[0])}; --help lists all")
    return namespace


def _config_file(argv: Sequence[str]) -> str | None:
    """What `--config` names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    name: str | None = parser.parse_known_args(argv)[0].config
    return name


def _read_yaml(file: str) -> dict[str, Any]:
    """The file's content; its top level has shared sections and components only."""
    try:
        document = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"--config: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"--config: {file} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        # Only the place: the parser's own message shows lines of the file, and one may hold a password.
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise StartupError(f"--config: {file}: {place}{getattr(error, 'problem', None) or 'not YAML'}") from None
    if document is None:
        return {}
    known = (*SHARED_SECTIONS, *COMPONENTS)
    if not isinstance(document, dict):
        raise StartupError(f"--config: {file}: must be a mapping of {', '.join(known)}")
    for key, section in document.items():
        if key not in known:
            raise StartupError(f"{key}: no such section; the sections are {', '.join(known)} ({file})")
        if section is not None and not isinstance(section, dict):
            raise StartupError(f"{key}: must be a mapping of settings, got {_show(section)} ({file})")
    return {key: section or {} for key, section in document.items()}


def _is_required_section(field: FieldInfo) -> bool:
    return field.is_required() and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Both, with the values of `high` where they meet; mappings are merged."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _describe(cls: type[ComponentSettings], error: ValidationError, sources: Sequence[_Source]) -> str:
    """All faults in one line."""
    faults = []
    for fault in error.errors(include_url=False):
        if fault["type"] == "default_factory_not_called":  # follows from another fault
            continue
        path = [str(part) for part in fault["loc"]]
        name = ".".join(path)
        if fault["type"] == "missing":
            flag, variable = _Source({}, "--", "."), _Source({}, PREFIX, "__", upper=True)
            faults.append(f"{name}: must be set, with {flag.spell(path)} or {variable.spell(path)} or in the YAML file")
            continue
        place = next((source for source in sources if source.holds(path)), None)
        origin = place.spell(path) if place else "default"
        if fault["type"] == "extra_forbidden":
            meant = nearest(cls, path) if place else None
            hint = f"; the closest is {place.spell(meant)}" if place and meant else ""
            faults.append(f"{name}: no such setting ({origin}){hint}")
            continue
        what = re.sub(r"^(Input|Value error,) ?", "", fault["msg"]).strip()
        if not path:  # of several settings, which it names itself
            faults.append(what)
            continue
        faults.append(f"{name}: {what}, got {_show(fault['input'])} ({origin})")
    return _one_line("; ".join(faults))


def _describe_unparsed(error: SettingsError) -> str:
    """One line for values that are not even JSON, and for flags that argparse refuses."""
    match = re.match(r'error parsing value for field "(?P<name>\w+)" from source "(?P<source>\w+)"', str(error))
    if not match:
        return _one_line(str(error).removeprefix("argument ").removeprefix("error parsing CLI: "))
    name = match["name"]
    place = f"flag --{name}" if match["source"].startswith("Cli") else f"environment variable {PREFIX}{name.upper()}"
    return f"{name}: must be JSON ({place})"


def redact(text: str) -> str:
    """`text` without what may be the user, the password or the token of a URL: fit for logs and errors."""
    # Up to the last @, because a password that nobody escaped may hold any character, @ and / too.
    text = re.sub(r"^(.*?//)?.*@", r"\1***@", text)
    return re.sub(r"(?i)(password|username)=[^&\s]*", r"\1=***", text)


def _show(value: object) -> str:
    """A bad value, short and without secrets."""
    text = redact(str(value))
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}...")


def _one_line(text: str) -> str:
    return " ".join(text.split())
