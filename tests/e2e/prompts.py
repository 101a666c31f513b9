"""Prompts of many kinds for the comparison with the reference implementation."""

from __future__ import annotations

_ESSAY = (
    "The history of the printing press is a history of patience. For centuries a book was copied by hand, one page "
    "after another, and each copy carried the small mistakes of its scribe into the next. When movable type came to "
    "Europe, the speed of copying changed first, and the idea of a correct copy changed after it. Printers kept the "
    "sheets of errata, readers wrote to them, and a second edition could be better than the first. "
)

TEXTS: tuple[str, ...] = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n: int) -> int:\n    ",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Liebe Grüße aus München! Heute",
    "日本の首都は",
    "🙂🙃 emoji are fun because",
    "   leading spaces and\ttabs\n\n\nand blank lines",
    "A",
    '{"name": "Ada", "born": 1815, "languages": [',
    _ESSAY,
    _ESSAY * 4 + "In short,",
)

CHATS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Why is the sky blue? Answer in one sentence."),),
    (("user", "What is 12 * 12?"),),
    (("system", "You answer like a pirate."), ("user", "Where is the treasure?")),
    (("user", "Hi!"), ("assistant", "Hello! How can I help you?"), ("user", "Tell me a joke about computers.")),
    (("user", "Écris une phrase sur le café."),),
    (("user", "List three prime numbers."),),
    (("user", "Summarize: " + _ESSAY * 2),),
    (("user", ""),),
)
