"""Copies of single blocks, put together where they follow each other on both sides. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class CopyRun(NamedTuple):
    """Blocks that follow each other on both sides."""

    source: int
    destination: int
    length: int


def copy_runs(source_ids: Sequence[int], destination_ids: Sequence[int]) -> Iterator[CopyRun]:
    """Splits a block-by-block copy into as few runs as there can be, in order."""
    start = 0
    for end in range(1, len(source_ids) + 1):
        length = end - start
        if (
            end == len(source_ids)
            or source_ids[end] != source_ids[start] + length
            or destination_ids[end] != destination_ids[start] + length
        ):
            yield CopyRun(source_ids[start], destination_ids[start], length)
            start = end
