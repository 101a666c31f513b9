"""Which settings there are: what a name that is none was meant to be, and which environment variables are refused."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from pydantic import BaseModel

from baton.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PREFIX = "BATON_"
COMPONENTS = ("gateway", "prefill_worker", "decode_worker")
# Sections that stand at the top of a YAML file and serve every component that has a field of the name.
SHARED_SECTIONS = ("model", "redis", "server", "telemetry", "engine", "lease")
# What else stands at the top of some component's settings. Processes may share one environment, so a component passes
# over what is another one's.
COMPONENT_SETTINGS = (
    "handover",
    "heartbeat_s",
    "limits",
    "max_unread_tokens",
    "max_waiting",
    "oldest_share",
    "prefix_cache",
    "queue",
    "shares_prefixes",
    "stall_s",
    "swap_bytes",
    "worker_id",
)
# Kubernetes and Docker tell each container of services and linked containers by such names: one that is called `baton`,
# or begins so, brings them. Ports have a URL's form.
_SERVICE_LINK = re.compile(
    r"BATON(_[A-Z0-9]+)*_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_[A-Z]+_[A-Z]+|ENV_.+)"
)
_SERVICE_PORT = re.compile(r"BATON(_[A-Z0-9]+)*_PORT(_\d+_[A-Z]+)?")
_PORT_VALUE = re.compile(r"(tcp|udp|sctp)://")


def check_environment(settings: type[BaseModel], class_name: str, environment: Mapping[str, str]) -> None:
    """Raises StartupError for a variable that begins with BATON_ and sets nothing, with the closest that would.

    What other components have passes, and so do the variables with which orchestrators name services.
    """
    for name, value in environment.items():
        upper = name.upper()
        if not upper.startswith(PREFIX) or _is_service_link(upper, value):
            continue
        path = upper.removeprefix(PREFIX).lower().split("__")
        if path[0] == class_name:
            own, is_known = path[1:], len(path) > 1 and path[1] in settings.model_fields
        else:
            own = path
            is_known = path[0] in {*SHARED_SECTIONS, *COMPONENT_SETTINGS, *settings.model_fields}
            is_known = is_known or (path[0] in COMPONENTS and len(path) > 1)
        if not is_known:
            kind = "section" if len(own) > 1 and own is path else "setting"
            hint = _nearest_variable(settings, class_name if own is not path else "", own)
            raise StartupError(f"{own[0] if own else path[0]}: no such {kind} (environment variable {name}); {hint}")


def nearest(settings: type[BaseModel], path: Sequence[str]) -> list[str] | None:
    """The path of the setting whose name is most like `path`; None when none is like it."""
    known = {".".join(each): each for each in _paths(settings)}
    found = difflib.get_close_matches(".".join(path), known, n=1)
    return known[found[0]] if found else None


def _nearest_variable(settings: type[BaseModel], class_name: str, path: list[str]) -> str:
    # One underscore where two are meant is the most likely mistake, also in what only another component has.
    for section in SHARED_SECTIONS:
        if not class_name and len(path) == 1 and path[0].startswith(f"{section}_"):
            return f"the closest is {PREFIX}{section.upper()}__{path[0].removeprefix(section + '_').upper()}"
    if found := nearest(settings, path):
        return f"the closest is {PREFIX}{'__'.join([class_name, *found] if class_name else found).upper()}"
    return "--help lists all settings"


def _paths(model: type[BaseModel]) -> Iterator[list[str]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for below in _paths(field.annotation):
                yield [name, *below]
        else:
            yield [name]


def _is_service_link(name: str, value: str) -> bool:
    if _SERVICE_LINK.fullmatch(name):
        return True
    return bool(_SERVICE_PORT.fullmatch(name) and _PORT_VALUE.match(value))
