"""What penalties, biases and forbidden tokens make of the model's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.token_rules import TokenRules


def apply_rules(logits: torch.Tensor, rules: Sequence[TokenRules | None]) -> torch.Tensor:
    """The logits that tokens are chosen from; `logits` is float32 [rows, vocab_size], with rules for each row.

    In this order: repetition, frequency and presence penalty, bias, tokens that may not come (-inf). Each row is
    computed on its own. Returns `logits` itself where no row has rules, else a copy.
    """
    ruled = [row for row, each in enumerate(rules) if each is not None]
    if not ruled:
        return logits
    adjusted = logits.clone()
    for row in ruled:
        row_rules = rules[row]
        assert row_rules is not None
        _apply(adjusted[row], row_rules)
    return adjusted


def _apply(row: torch.Tensor, rules: TokenRules) -> None:
    """Changes one row [vocab_size] in place."""
    sampling = rules.sampling
    if rules.seen_ids:
        seen = _ids(list(rules.seen_ids), row)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if rules.output_counts:
        counts = torch.tensor(list(rules.output_counts.values()), dtype=row.dtype, device=row.device)
        row[_ids(list(rules.output_counts), row)] -= counts * sampling.frequency_penalty + sampling.presence_penalty
    if sampling.logit_bias:
        biases = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=row.dtype, device=row.device)
        row[_ids([token_id for token_id, _ in sampling.logit_bias], row)] += biases
    if rules.forbidden_ids:
        row[_ids(list(rules.forbidden_ids), row)] = -torch.inf
    if rules.allowed is not None:
        row.masked_fill_(_is_unset(rules.allowed, row), -torch.inf)


def _is_unset(bits: bytearray, row: torch.Tensor) -> torch.Tensor:
    """Whether each token's bit is 0 [vocab_size]; ids beyond the bits have none."""
    packed = torch.frombuffer(bits, dtype=torch.uint8).to(row.device)
    unset = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=row.device)) & 1 == 0
    unset = unset.view(-1)[: len(row)]
    return torch.nn.functional.pad(unset, (0, len(row) - len(unset)), value=True)


def _ids(ids: list[int], row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.long, device=row.device)
