from __future__ import annotations

import math
import pickle

import pytest

from baton.core.errors import InvalidArgumentError
from baton.core.model import KVLayout
from baton.v1 import kv_transfer_pb2 as pb
from kv_transfer import wire
from kv_transfer.descriptor import KVDescriptor

DESCRIPTOR = KVDescriptor(
    lease_id="lease",
    lease_slot=0,
    generation=2**64 - 1,
    worker_id="prefill-1",
    incarnation="life-1",
    address="localhost:1",
    block_ids=(0, 7),
    num_tokens=17,
    lease_s=5.0,
)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="float16")


def test_a_descriptor_survives_the_wire_and_the_pipe():
    data = wire.descriptor_to_proto(DESCRIPTOR).SerializeToString()
    assert wire.descriptor_from_proto(pb.KvDescriptor.FromString(data)) == DESCRIPTOR
    assert pickle.loads(pickle.dumps(DESCRIPTOR)) == DESCRIPTOR


def test_a_layout_survives_the_wire():
    assert wire.layout_from_proto(wire.layout_to_proto(LAYOUT)) == LAYOUT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_id", ""),
        ("worker_id", ""),
        ("incarnation", ""),
        ("address", ""),
        ("generation", 0),
        ("num_tokens", 0),
        ("lease_s", 0.0),
        ("lease_s", -1.0),
        ("lease_s", math.nan),
        ("lease_s", math.inf),
    ],
)
def test_a_malformed_descriptor_is_refused_by_field(name, value):
    message = wire.descriptor_to_proto(DESCRIPTOR)
    setattr(message, name, value)
    with pytest.raises(InvalidArgumentError) as refusal:
        wire.descriptor_from_proto(message)
    assert refusal.value.field == f"kv.{name}"


@pytest.mark.parametrize(("num_tokens", "fits"), [(16, False), (17, True), (32, True), (33, False)])
def test_blocks_are_counted_at_their_boundaries(num_tokens, fits):
    message = wire.descriptor_to_proto(DESCRIPTOR)
    message.num_tokens = num_tokens
    descriptor = wire.descriptor_from_proto(message)
    if fits:
        descriptor.require_fits(LAYOUT)
    else:
        with pytest.raises(InvalidArgumentError, match="block"):
            descriptor.require_fits(LAYOUT)


def test_no_message_of_the_handover_carries_a_point_in_time():
    """Two processes' clocks cannot be compared: durations travel."""
    fields = [field for message in pb.DESCRIPTOR.message_types_by_name.values() for field in message.fields]
    assert {field.name for field in fields if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT)} == {"lease_s"}
    assert not [field.full_name for field in fields if field.name.endswith("_at") or "_at_" in field.name]
