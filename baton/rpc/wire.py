"""Finds what is wrong with bytes that are no valid message.

protobuf says only that parsing failed. A client's author needs the field; so the bytes are walked once more, by the
message's descriptor, and only then. See protobuf's encoding guide for the format.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from google.protobuf.descriptor import FieldDescriptor

from baton.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
# Repeated fields of these types have one entry an element; numbers may be packed into one.
_UNPACKED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)
_MAX_DEPTH = 100
# What is looked at, some 20 ms of the event loop's time: a message may have millions.
_MAX_FIELDS = 10_000


def explain_malformed(descriptor: Descriptor, data: bytes) -> InvalidArgumentError:
    """The error for `data`, which failed to parse as `descriptor`'s message; its field is a path such as
    `messages[1].content`, or `request` when the fault belongs to no field, or lies behind very many others.
    """
    try:
        _Walk().through(descriptor, data, "", 0)
    except InvalidArgumentError as error:
        return error
    return _no_valid(descriptor)


class _Walk:
    """One look at a message, at `_MAX_FIELDS` of its fields at most, those of messages in it included."""

    def __init__(self) -> None:
        self._num_fields = 0

    def through(self, descriptor: Descriptor, data: bytes, path: str, depth: int) -> None:
        """Raises InvalidArgumentError at the first fault."""
        seen: Counter[int] = Counter()
        position = 0
        while position < len(data):
            self._num_fields += 1
            if self._num_fields > _MAX_FIELDS:
                raise _no_valid(descriptor, f": the fault is behind its first {_MAX_FIELDS} fields")
            tag, position = _varint(data, position, path)
            number, wire_type = tag >> 3, tag & 7
            field = descriptor.fields_by_number.get(number)
            here = _extend(path, field, seen[number]) if field else path
            seen[number] += 1
            if wire_type == _VARINT:
                _, position = _varint(data, position, here)
            elif wire_type in _FIXED_BYTES:
                position += _FIXED_BYTES[wire_type]
            elif wire_type == _LENGTH:
                size, position = _varint(data, position, here)
                if position + size > len(data):
                    raise _malformed(here, "is cut short")
                if field:
                    self._look_into(field, data[position : position + size], here, depth)
                position += size
            else:
                raise _malformed(here, f"has wire type {wire_type}, which no field of {descriptor.full_name} has")
            if position > len(data):
                raise _malformed(here, "is cut short")

    def _look_into(self, field: FieldDescriptor, value: bytes, path: str, depth: int) -> None:
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                value.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InvalidArgumentError(
                    path, f"is not UTF-8: byte {error.start} is 0x{value[error.start]:02x}", reason="INVALID_UTF8"
                ) from None
        elif field.message_type is not None:
            if depth == _MAX_DEPTH:
                raise _malformed(path, f"is nested deeper than {_MAX_DEPTH} messages")
            self.through(field.message_type, value, path, depth + 1)


def _varint(data: bytes, position: int, path: str) -> tuple[int, int]:
    """The number at `position` and the position after it."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(data):
            raise _malformed(path, "is cut short")
        byte = data[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise _malformed(path, "holds a number of more than 64 bits")


def _extend(path: str, field: FieldDescriptor, index: int) -> str:
    name = f"{field.name}[{index}]" if field.is_repeated and field.type in _UNPACKED else field.name
    return f"{path}.{name}" if path else name


def _malformed(path: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError(path or "request", description, reason="MALFORMED_MESSAGE")


def _no_valid(descriptor: Descriptor, why: str = "") -> InvalidArgumentError:
    return _malformed("request", f"is no valid {descriptor.full_name}{why}")
