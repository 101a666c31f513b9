from __future__ import annotations

import torch

from baton.engine.staging import NUM_BUFFERS, Staging

CPU = torch.device("cpu")


class Marks:
    """Hands out marks and says what is asked of them, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.num_marks = 0

    def make(self) -> _Mark:
        self.num_marks += 1
        return _Mark(self, self.num_marks - 1)


class _Mark:
    def __init__(self, marks: Marks, number: int) -> None:
        self._marks, self._number = marks, number

    def record(self) -> None:
        self._marks.calls.append(("record", self._number))

    def synchronize(self) -> None:
        self._marks.calls.append(("wait", self._number))


def test_values_arrive_whatever_becomes_of_the_source():
    staging = Staging(CPU)
    values = torch.arange(5, dtype=torch.int32)
    sent = staging.upload(values)
    values.zero_()
    into = torch.zeros(3, dtype=torch.int64)
    assert staging.upload(torch.tensor([7, 8, 9]), into=into) is into
    for _ in range(2 * NUM_BUFFERS):
        staging.upload(torch.full((100,), 3))
    assert sent.tolist() == [0, 1, 2, 3, 4]
    assert sent.dtype == torch.int32
    assert into.tolist() == [7, 8, 9]
    assert staging.download(torch.tensor([4, 2])) == [4, 2]


def test_a_buffer_is_used_again_only_when_its_copy_is_over():
    marks = Marks()
    staging = Staging(CPU, marks.make)
    for _ in range(NUM_BUFFERS + 1):
        staging.upload(torch.tensor([1]))
    once = [(call, number) for number in range(NUM_BUFFERS) for call in ("wait", "record")]
    assert marks.calls == [*once, ("wait", 0), ("record", 0)]


def test_what_comes_back_is_read_when_its_copy_is_over():
    marks = Marks()
    Staging(CPU, marks.make).download(torch.tensor([1]))
    assert marks.calls == [("wait", 0), ("record", 0), ("wait", 0)]
