"""Whether a consumer's position can be used with a buffer: what serve, confirm and consume ask first."""

from __future__ import annotations

from bsfg.errors import ConsumerRetired, ForeignLog, InvalidArgument
from bsfg.ports import ConsumerState, Replayable


def check_consumer(state: ConsumerState, buffer: Replayable) -> None:
    """Raise unless the consumer is alive and its position belongs to this buffer's history."""
    spec = state.spec
    if state.retired_reason is not None:
        raise ConsumerRetired(f"consumer {spec.name} was retired: {state.retired_reason}", reason=state.retired_reason)
    if (spec.stream, spec.buffer) != (buffer.stream, buffer.buffer):
        raise InvalidArgument(
            f"consumer {spec.name} reads the {spec.buffer} buffer of {spec.stream}, "
            f"not the {buffer.buffer} buffer of {buffer.stream}"
        )
    if state.log_id != buffer.log_id:
        raise ForeignLog(f"consumer {spec.name} stands in log {state.log_id}, this is {buffer.log_id}")
