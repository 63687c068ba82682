"""Messages that are nearly right: made from the protocol's own description, then damaged."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

TEXTS = (
    "",
    "operational",
    "audit",
    "historian",
    "app-1",
    "plant",
    "enterprise",
    "from-enterprise",
    "receiver",
    "sender",
    "x" * 300,
    "\x1b[2J",
    "é",
    "sha256:" + 64 * "0",
)
NUMBERS = (0, 1, -1, 2, 5, 100, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, -(1 << 63))
VALUES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 99),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -1.0, 1e300, float("inf"), float("nan")),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, -1.0, 1e30, float("inf"), float("nan")),
}
BOUNDS = {
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
}


def made(message_type: Any, chance: Random, blobs: list[bytes], depth: int = 0) -> Any:
    """Make a message with some of its fields set to values that may well mean something."""
    message = message_type()
    for field in message_type.DESCRIPTOR.fields:
        if chance.random() < 0.3 or depth > 3:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[chance.choice(TEXTS)] = chance.choice(TEXTS)
        elif field.is_repeated:
            values = [_value(field, chance, blobs, depth) for _ in range(chance.randrange(4))]
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_value(field, chance, blobs, depth))
        else:
            setattr(message, field.name, _value(field, chance, blobs, depth))
    return message


def _value(field: Any, chance: Random, blobs: list[bytes], depth: int) -> Any:
    if field.message_type is not None:
        return made(GetMessageClass(field.message_type), chance, blobs, depth + 1)
    if field.type == FieldDescriptor.TYPE_BYTES:
        blob = chance.choice(blobs)
        return damaged(blob, chance) if chance.random() < 0.5 else blob
    choices = VALUES.get(field.cpp_type)
    if choices is not None:
        return chance.choice(choices)
    low, high = BOUNDS.get(field.cpp_type, BOUNDS[FieldDescriptor.CPPTYPE_INT64])
    return max(low, min(high, chance.choice(NUMBERS)))


def damaged(data: bytes, chance: Random) -> bytes:
    """Damage bytes in one to four places: turned, removed, repeated, put in, or cut off."""
    found = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(5):
            case 0 if at < len(found):
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                del found[at : at + chance.randrange(1, 9)]
            case 2:
                found[at:at] = found[at : at + chance.randrange(1, 40)]
            case 3:
                found[at:at] = chance.randbytes(chance.randrange(1, 9))
            case _:
                del found[at:]
    return bytes(found)
