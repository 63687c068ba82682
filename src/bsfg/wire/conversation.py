"""Questions to a node over a call that stays open: each costs both sides half of what a call of its own does.

A question that fails ends the call, and the next one opens another; so nothing here is ever answered with what another
question asked for. All questions of this kind may be repeated without harm.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import grpc

from bsfg.errors import BsfgError, PeerUnreachable, RemoteError, TimedOut
from bsfg.wire.connection import Connection, unreadable
from bsfg.wire.framestream import STREAM_SECONDS


class Conversations:
    """The conversations with a node about one matter, one for each topic: ``method`` over and over, in one call.

    Where the node does not know the method, and for a question that comes while another one is being answered, there
    is ``single``, which takes the same question in a call of its own.
    """

    def __init__(self, connection: Connection, method: str, single: str) -> None:
        self._connection, self._method, self._single = connection, method, single
        self._open: dict[str, Conversation] = {}
        self._is_known = True

    async def ask(self, topic: str, question: Any, *, timeout_seconds: float | None = None) -> Any:
        """Ask and give the answer; raises only `BsfgError`."""
        conversation = self._open.setdefault(topic, Conversation(self._connection, self._method))
        if self._is_known and not conversation.is_busy:
            try:
                return await conversation.ask(question, timeout_seconds=timeout_seconds)
            except RemoteError as error:
                if not is_unimplemented(error):
                    raise
                self._is_known = False
        return await self._connection.call(self._single, question, timeout_seconds=timeout_seconds)

    def end(self) -> None:
        """End all calls; a question that comes later opens its own."""
        for conversation in self._open.values():
            conversation.hang_up()


class Conversation:
    """One call with questions one way and answers the other, one at a time."""

    def __init__(self, connection: Connection, method: str) -> None:
        self._connection, self._method = connection, method
        self._call: Any = None
        self._made_by: Any = None
        self._ends = 0.0
        self.is_busy = False

    async def ask(self, question: Any, *, timeout_seconds: float | None = None) -> Any:
        """Ask and give the answer."""
        timeout = self._connection.request_timeout_seconds if timeout_seconds is None else timeout_seconds
        self.is_busy = True
        try:
            async with asyncio.timeout(timeout):
                return await self._asked(question)
        except TimeoutError:
            raise TimedOut(f"{self._connection.address} did not answer within {timeout:g} s") from None
        finally:
            self.is_busy = False

    async def _asked(self, question: Any) -> Any:
        if self._is_open():
            # The node may have ended the silence just now, or may be another one since it was last asked.
            with suppress(PeerUnreachable):
                answer = await self._exchange(question)
                if answer is not grpc.aio.EOF:
                    return answer
        self._call, self._ends = self._connection.stream(self._method), time.monotonic() + STREAM_SECONDS
        answer = await self._exchange(question)
        if answer is grpc.aio.EOF:
            raise PeerUnreachable(f"{self._connection.address} ended the call")
        return answer

    def _is_open(self) -> bool:
        """Tell whether the call can go on; not when the connection was made anew meanwhile."""
        made_by, self._made_by = self._made_by, self._connection.method(self._method)
        if self._call is None or self._call.done():
            return False
        if made_by is not self._made_by or time.monotonic() >= self._ends:
            self.hang_up()
            return False
        return True

    async def _exchange(self, question: Any) -> Any:
        """Send a question and wait for its answer; EOF when the node has ended the call in peace."""
        call, ended = self._call, None
        try:
            with self._connection.telling():
                try:
                    await call.write(question)
                    answer = await call.read()
                except asyncio.InvalidStateError:
                    answer = grpc.aio.EOF
                if answer is grpc.aio.EOF:
                    ended = await self._connection.ended_with(call)
        except BaseException:
            # Its answer may still come, and would be taken for that of the next question.
            self.hang_up()
            raise
        if answer is grpc.aio.EOF or answer is None:
            self.hang_up()
        if answer is None:
            raise unreadable(self._connection)
        if ended is not None:
            raise ended
        return answer

    def hang_up(self) -> None:
        """End the call."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


def is_unimplemented(error: BsfgError) -> bool:
    """Tell whether a node does not know a method: it is of an older version."""
    return error.details.get("remote_code") == "unimplemented"
