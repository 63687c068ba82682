"""Errors of files that become facts: what is wrong with a file or with one of its rows."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


class RowUnreadable(BsfgError):
    """A row of a file cannot be read: it is not JSON, has too many or too few fields, or is not text."""

    code = "row_unreadable"
    default_hint = "Correct the row and ingest it again; the reject file holds it with its place."


class FileUnreadable(BsfgError):
    """A file, or a part of it, cannot be read as what it is said to be."""

    code = "file_unreadable"
    default_hint = "Check that the file is whole and of the format that its name says, or give --format."


class FileChanged(BsfgError):
    """A file is not what it was when its ingestion began."""

    code = "file_changed"
    default_hint = (
        "Restore the file, or choose: --changed again takes its rows anew, --changed skip leaves out what is left."
    )
