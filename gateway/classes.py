"""Queue classes: short and long prompts wait apart, so that a chat never stands behind a book."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from baton.coordination.limits import ClassLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueClass:
    """One class: prompts of up to `max_prompt_tokens` that fit no smaller class; None: of any length.

    A request waits at most `queue_timeout_s` for workers and lives at most `request_timeout_s`; None: as long as the
    gateway lets any request live.
    """

    name: str
    max_prompt_tokens: int | None
    limits: ClassLimits
    queue_timeout_s: float
    request_timeout_s: float | None = None


class QueueClasses:
    """All classes of a gateway. Exactly one of them has no bound."""

    def __init__(self, classes: Iterable[QueueClass]) -> None:
        def bound(queue_class: QueueClass) -> float:
            return float("inf") if queue_class.max_prompt_tokens is None else queue_class.max_prompt_tokens

        self._by_bound = sorted(classes, key=bound)
        assert [c.max_prompt_tokens is None for c in self._by_bound].count(True) == 1, "one class must have no bound"

    @property
    def limits(self) -> Mapping[str, ClassLimits]:
        """The limits by name, as the queue takes them."""
        return {queue_class.name: queue_class.limits for queue_class in self._by_bound}

    def classify(self, prompt_tokens: int) -> QueueClass:
        """The class with the smallest bound that a prompt of that many tokens fits."""
        return next(
            queue_class
            for queue_class in self._by_bound
            if queue_class.max_prompt_tokens is None or prompt_tokens <= queue_class.max_prompt_tokens
        )
