"""What a process has synced, by path: no power is lost in a test, so that is all that shows what would survive it."""

from __future__ import annotations

import os

import pytest


def noted_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give a list to which every file and folder is added that is synced from now on."""
    synced, sync = list[str](), os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", noted)
    return synced
