"""An event loop in a thread of its own, for programs that do not use asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from bsfg.errors import InvalidArgument, StorageClosed, TimedOut

T = TypeVar("T")

FORGOTTEN_SECONDS = 5.0
"""How long something that was not closed holds up the end of a program."""


class LoopThread:
    """Runs coroutines for other threads; it ends with the program at the latest."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        """What other threads wait for; none of it may be left when the loop ends."""
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            with self._lock:
                self._ended = True
            # A call that came while the loop was told to stop has been queued but not begun; it is cancelled too.
            for future in list(self._waiting):
                future.cancel()
            with contextlib.suppress(RuntimeError):
                self.loop.run_until_complete(self.loop.shutdown_asyncgens())
                self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Run a coroutine in the loop and give its result; raises `TimedOut`, and then it is cancelled."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InvalidArgument("this would wait for its own thread", hint="Do not block inside a callback.")
        with self._lock:
            if self._ended:
                coroutine.close()
                raise StorageClosed("it is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self._waiting.add(future)
        try:
            return future.result(timeout_seconds)
        except FutureTimeout:
            if future.done():
                raise
            future.cancel()
            raise TimedOut(f"it was not done within {timeout_seconds} s") from None
        except CancelledError:
            raise StorageClosed("it was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waiting.discard(future)

    def stop(self) -> None:
        """End the loop and its thread; repeats are harmless."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self.loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join()


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call something in a loop: at once in its own thread, soon from another one, not at all when it has ended."""
    try:
        if asyncio.get_running_loop() is loop:
            call(*args)
            return
    except RuntimeError:
        pass
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def close_forgotten(thread: LoopThread, close: Callable[[float], Coroutine[Any, Any, None]]) -> None:
    """Close what an application forgot to close when it is collected or the program ends, as well as is possible."""
    with contextlib.suppress(Exception):
        thread.run(close(FORGOTTEN_SECONDS), 2 * FORGOTTEN_SECONDS)
    thread.stop()
