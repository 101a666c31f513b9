from __future__ import annotations

import os
import re
import stat
from dataclasses import replace

import pytest

from baton.core.errors import StartupError
from baton.core.model import KVLayout
from kv_transfer import segment
from kv_transfer.descriptor import PeerKey, ShmHandle
from kv_transfer.errors import PeerGoneError, PoolMismatchError
from kv_transfer.segment import SHM_DIRECTORY, Segment, SegmentSpec, SegmentView, reap_stale_segments

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
SPEC = SegmentSpec(layout=LAYOUT, num_blocks=3, num_slots=1000, incarnation="life-1")


@pytest.fixture
def owner(tmp_path):
    owner = Segment.create(SPEC, tmp_path)
    yield owner
    owner.close()


PEER = PeerKey("prefill", "life-1")


def test_a_segment_is_private_full_size_and_allocated(owner, tmp_path):
    status = os.stat(tmp_path / owner.handle.segment)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == SPEC.num_bytes
    assert status.st_blocks * 512 >= SPEC.num_bytes


def test_fence_table_and_blocks_lie_apart_on_their_own_pages():
    assert SPEC.blocks_offset % 4096 == 0
    assert SPEC.blocks_offset >= 4096 + 1000 * 8


def test_a_reader_sees_words_and_blocks_as_they_are_written(owner, tmp_path):
    view = SegmentView.open(PEER, LAYOUT, owner.handle, tmp_path)
    assert [view.fence(slot) for slot in (0, 999)] == [0, 0]
    owner.store(999, 2**63 + 5)
    owner.blocks[-1] = 17
    assert view.fence(999) == 2**63 + 5
    assert view.blocks[-1] == 17
    assert view.blocks.readonly
    assert len(view.blocks) == 3 * LAYOUT.block_bytes
    view.close()


def test_closing_clears_every_word_and_unlinks(owner, tmp_path):
    view = SegmentView.open(PEER, LAYOUT, owner.handle, tmp_path)
    owner.store(0, 1)
    owner.store(999, 2)
    owner.close()
    owner.close()
    assert [view.fence(slot) for slot in (0, 999)] == [0, 0]
    assert list(tmp_path.iterdir()) == []
    owner.store(0, 0)
    view.close()
    with pytest.raises(PeerGoneError):
        SegmentView.open(PEER, LAYOUT, owner.handle, tmp_path)


@pytest.mark.parametrize(
    ("peer", "layout", "num_blocks", "what"),
    [
        (PeerKey("prefill", "life-2"), LAYOUT, 3, "incarnation"),
        (PeerKey("prefill", "life-1"), replace(LAYOUT, dtype="bfloat16"), 3, "block bytes"),
        (PeerKey("prefill", "life-1"), replace(LAYOUT, num_layers=4, head_dim=4), 3, "layout"),
        (PeerKey("prefill", "life-1"), LAYOUT, 4, "num blocks"),
    ],
)
def test_a_segment_that_is_not_what_was_promised_is_refused(owner, tmp_path, peer, layout, num_blocks, what):
    handle = ShmHandle(segment=owner.handle.segment, num_blocks=num_blocks)
    with pytest.raises(PoolMismatchError, match=what):
        SegmentView.open(peer, layout, handle, tmp_path)


@pytest.mark.parametrize("content", [b"", b"short", bytes(8192)])
def test_a_file_that_is_no_segment_is_refused(tmp_path, content):
    name = "baton-" + "0" * 32
    (tmp_path / name).write_bytes(content)
    handle = ShmHandle(segment=name, num_blocks=3)
    with pytest.raises(PoolMismatchError):
        SegmentView.open(PEER, LAYOUT, handle, tmp_path)


def test_a_truncated_segment_is_refused_and_not_a_bus_error(owner, tmp_path):
    copy = tmp_path / ("baton-" + "1" * 32)
    copy.write_bytes((tmp_path / owner.handle.segment).read_bytes()[:-1])
    handle = ShmHandle(segment=copy.name, num_blocks=3)
    with pytest.raises(PoolMismatchError, match="shorter"):
        SegmentView.open(PEER, LAYOUT, handle, tmp_path)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "baton-x", "baton-" + "0" * 32 + "/x"])
def test_a_peer_cannot_point_a_reader_at_another_file(tmp_path, name):
    handle = ShmHandle(segment=name, num_blocks=3)
    with pytest.raises(PoolMismatchError, match="not a segment's name"):
        SegmentView.open(PEER, LAYOUT, handle, tmp_path)


def test_a_symbolic_link_is_neither_read_nor_followed_by_the_reaper(tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"x")
    link = tmp_path / ("baton-" + "2" * 32)
    link.symlink_to(target)
    assert reap_stale_segments(tmp_path) == []
    assert target.exists()


def test_shared_memory_that_does_not_suffice_is_one_line_at_start_and_leaves_nothing(monkeypatch):
    made = []
    create = segment._create_locked
    monkeypatch.setattr(segment, "_create_locked", lambda directory: made.append(create(directory)) or made[-1])
    usage = os.statvfs(SHM_DIRECTORY)
    too_many = usage.f_blocks * usage.f_frsize // LAYOUT.block_bytes + 1
    with pytest.raises(StartupError, match=r"does not fit in /dev/shm .*kv_cache_bytes") as failure:
        Segment.create(replace(SPEC, num_blocks=too_many))
    assert "\n" not in str(failure.value)
    [(path, _)] = made
    assert path.parent == SHM_DIRECTORY
    assert not path.exists()


def test_the_reaper_takes_what_has_no_owner_and_nothing_else(owner, tmp_path):
    stale = tmp_path / ("baton-" + "3" * 32)
    stale.write_bytes(b"left behind")
    other = tmp_path / "baton-config"
    other.write_bytes(b"not a segment")
    assert reap_stale_segments(tmp_path) == [stale.name]
    assert {path.name for path in tmp_path.iterdir()} == {owner.handle.segment, other.name}


def test_a_creator_whose_file_was_reaped_before_it_was_locked_makes_another(tmp_path, monkeypatch):
    names = []

    def reap_between(fd, operation):
        if not names:
            names.extend(path.name for path in tmp_path.iterdir())
            (tmp_path / names[0]).unlink()

    monkeypatch.setattr(segment.fcntl, "flock", reap_between)
    owner = Segment.create(SPEC, tmp_path)
    assert owner.handle.segment != names[0]
    assert re.fullmatch(r"baton-[0-9a-f]{32}", owner.handle.segment)
    assert (tmp_path / owner.handle.segment).exists()
    owner.close()
