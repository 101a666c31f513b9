"""Queue classes: short and long prompts wait apart, so that a chat never stands behind a book."""

from __future__ import annotations

CHAT = "chat"
LONG = "long"


def classify(prompt_tokens: int, *, long_prompt_tokens: int) -> str:
    """The class of a prompt: `long` from `long_prompt_tokens` tokens on, else `chat`."""
    return LONG if prompt_tokens >= long_prompt_tokens else CHAT
