"""Classes come from the configuration; who waits in which is decided by the prompt's length alone."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidArgumentError, StartupError
from gateway.caller import read_caller
from gateway.settings import GatewaySettings


def load(monkeypatch: pytest.MonkeyPatch, *flags: str, **environment: str):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return GatewaySettings.load(["--model.path", "/m", *flags])


def test_chats_are_below_1024_tokens(monkeypatch):
    classes = load(monkeypatch).queue.queue_classes
    assert [classes.classify(n).name for n in (1, 1023, 1024, 8000)] == ["chat", "chat", "long", "long"]
    assert {name: limits.weight for name, limits in classes.limits.items()} == {"chat": 4.0, "long": 1.0}


def test_a_class_can_be_refined_added_and_removed(monkeypatch):
    settings = load(
        monkeypatch,
        BATON_QUEUE__CLASSES__CHAT__MAX_WAITING="7",
        BATON_GATEWAY__QUEUE__CLASSES__BOOK='{"max_prompt_tokens": 8000, "request_timeout_s": 30}',
    )
    classes = settings.queue.queue_classes
    assert [classes.classify(n).name for n in (1023, 1024, 8000, 8001)] == ["chat", "book", "book", "long"]
    assert (classes.limits["chat"].max_waiting, classes.limits["chat"].weight) == (7, 4.0)
    assert classes.classify(2000).request_timeout_s == 30
    only = load(monkeypatch, "--queue.classes", '{"chat": null, "book": null}').queue
    assert [only.queue_classes.classify(n).name for n in (1, 8000)] == ["long", "long"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"long": null}', "exactly one class must have no max_prompt_tokens"),
        ('{"x": {}}', "exactly one class must have no max_prompt_tokens"),
        ('{"x": {"max_prompt_tokens": 1023}}', "same max_prompt_tokens"),
        ('{"a|b": {"max_prompt_tokens": 1}}', "pattern"),
        ('{"chat": {"weight": 0}}', "greater than 0"),
    ],
)
def test_classes_that_leave_a_prompt_without_one_are_refused(monkeypatch, given, words):
    with pytest.raises(StartupError, match=words) as error:
        load(monkeypatch, "--queue.classes", given)
    assert "queue.classes" in str(error.value)


class Context:
    def __init__(self, *metadata, left_s=None):
        self.metadata, self.left_s = metadata, left_s

    def invocation_metadata(self):
        return self.metadata

    def time_remaining(self):
        return self.left_s


def test_a_caller_has_a_tenant_and_a_deadline():
    caller = read_caller(Context(left_s=5.0), longest_s=60)
    assert (caller.tenant, round(caller.timeout_s, 2)) == ("default", 4.95)
    caller = read_caller(Context(("other", "x"), ("x-baton-tenant", "Team.1_a-b")), longest_s=60)
    assert (caller.tenant, caller.timeout_s) == ("Team.1_a-b", 60)


@pytest.mark.parametrize("values", [("",), ("a|b",), ("a}",), ("x" * 65,), ("é",), ("a\n",), ("a", "a")])
def test_a_tenant_that_is_no_name_is_refused(values):
    with pytest.raises(InvalidArgumentError, match="x-baton-tenant"):
        read_caller(Context(*[("x-baton-tenant", value) for value in values]), longest_s=60)
