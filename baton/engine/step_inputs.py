"""What the layers of a step read besides weights, pool and attention."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from baton.core.model import KVLayout
    from baton.engine.batch import BatchPlan

# Numbers for each token, by which one flat tensor has room for a step.
NUMBERS_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Int64 numbers of each token: its id and position [tokens], and where its key and value go [tokens * 2].

    `pool_rows` are rows of the pool's `positions_view` in layer 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    pool_rows: torch.Tensor

    @classmethod
    def of(cls, plan: BatchPlan, layout: KVLayout) -> StepInputs:
        """Those of a plan, in host memory."""
        block_size = layout.block_size
        # Arrays, because tensors of lists are several times as slow to make.
        token_ids, positions, key_rows = array("q"), array("q"), array("q")
        for piece in plan.slices:
            token_ids.extend(iter(piece.token_ids))  # other ranks get them as arrays of another kind
            positions.extend(range(piece.start_position, piece.end_position))
            start = piece.start_position
            while start < piece.end_position:
                index, within = divmod(start, block_size)
                count = min(block_size - within, piece.end_position - start)
                row = piece.block_table[index] * layout.num_layers * 2 * block_size + within
                key_rows.extend(range(row, row + count))
                start += count
        ids, places, keys = (torch.frombuffer(each, dtype=torch.int64) for each in (token_ids, positions, key_rows))
        return cls(ids, places, torch.stack((keys, keys + block_size), 1).view(-1))

    @classmethod
    def over(cls, flat: torch.Tensor) -> StepInputs:
        """Views of a tensor as `flat` makes it: they change with it."""
        num_tokens = len(flat) // NUMBERS_A_TOKEN
        return cls(flat[:num_tokens], flat[num_tokens : 2 * num_tokens], flat[2 * num_tokens :])

    def flat(self) -> torch.Tensor:
        """All of it in one tensor [tokens * NUMBERS_A_TOKEN]: one copy to a device."""
        return torch.cat((self.token_ids, self.positions, self.pool_rows))
