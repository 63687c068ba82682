"""Errors of a storage: what it cannot do, now or at all."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


class BufferFull(BsfgError):
    """The buffer has reached its capacity and its policy is to reject new facts."""

    code = "buffer_full"
    retryable = True
    default_hint = "Keep the fact and retry; see why the frontier does not move, or raise store_capacity."


class QuarantineFull(BufferFull):
    """Quarantine is full of refused facts that wait for an operator; nothing of the batch was stored."""

    code = "quarantine_full"
    retryable = True
    default_hint = "Settle what waits (bsfg quarantine list, export, retry, drop), or raise quarantine_bytes."


class OutcomeUnknown(BsfgError):
    """The medium failed while the batch was being made durable: it may or may not be stored."""

    code = "outcome_unknown"
    retryable = True
    default_hint = "Send the same facts with the same message ids again: what was stored is answered as a repeat."


class StorageClosed(BsfgError):
    """The storage is closed, or closed itself after a failed fsync."""

    code = "storage_closed"
    retryable = True
    default_hint = "Reopen the storage; if it closed itself, check the disk first (dmesg, smartctl)."


class StreamUnavailable(BsfgError):
    """One stream of the node cannot be opened and is out of service; all others work."""

    code = "stream_unavailable"
    retryable = True
    default_hint = "Keep the facts and retry; run `bsfg verify` on the data folder, repair what it names, then restart."

    @classmethod
    def because(cls, stream: str, buffer: str, error: Exception) -> StreamUnavailable:
        """Say of one buffer why it cannot be opened."""
        code = error.code if isinstance(error, BsfgError) else BsfgError.code
        says = error.message if isinstance(error, BsfgError) else f"{type(error).__name__}: {error}"
        return cls(f"{stream}/{buffer} cannot be opened: {code}: {says}", stream=stream, cause=code)


class DiskFull(BsfgError):
    """The file system has no space left; nothing of the batch was stored."""

    code = "disk_full"
    retryable = True
    default_hint = "Free space on the volume or lower store_capacity; facts stored so far are intact."


class StorageBusy(BsfgError):
    """The system lacked something for a moment, mostly a file descriptor; nothing was stored."""

    code = "storage_busy"
    retryable = True
    default_hint = "Retry; if it comes again, raise the limit of open files (ulimit -n, LimitNOFILE) or free memory."


class StorageFailed(BsfgError):
    """The medium reported an input/output error."""

    code = "storage_failed"
    default_hint = "Check the disk (dmesg, smartctl), then reopen and run `bsfg verify` on the folder."


class StorageReadOnly(BsfgError):
    """The folder cannot be written."""

    code = "storage_read_only"
    default_hint = "Make the folder writable for this user, or choose another one."


class StorageUnreadable(BsfgError):
    """A file or folder cannot be read by this user."""

    code = "storage_unreadable"
    default_hint = "Run it as the user that runs the node, or let this user read it."


class FolderLocked(BsfgError):
    """Another process is the writer of this folder."""

    code = "folder_locked"
    default_hint = "Stop the other process, or read the folder with LocalReader; one folder has one writer."


class NotAFolder(BsfgError):
    """The path holds no BSFG data folder."""

    code = "not_a_data_folder"
    default_hint = "Give the data folder of a zone: the one that contains bsfg.json."


class FormatUnsupported(BsfgError):
    """The folder was written in a format that this version does not read."""

    code = "format_unsupported"
    default_hint = "Use a version of BSFG at least as new as the one that wrote the folder."


class LogDamaged(BsfgError):
    """Stored bytes fail their checks; what they covered is reported as a gap, never skipped."""

    code = "log_damaged"
    default_hint = "Run `bsfg verify` for the full list; restore the folder from a backup or fetch the range again."


class ForeignLog(BsfgError):
    """The history on the other side is not the one this position belongs to."""

    code = "foreign_log"
    default_hint = "The folder was restored or replaced: reconcile the link before you release its gate."


class HasherMismatch(BsfgError):
    """The folder was written with another digest function."""

    code = "hasher_mismatch"
    default_hint = "Open the folder with the hasher named in its bsfg.json."


class PolicyInvalid(BsfgError):
    """A stream's settings contradict each other."""

    code = "policy_invalid"
    default_hint = 'Keep retention <= max age <= key horizon, and reject_new for streams with safety = "sil".'


class BackupUntrusted(BsfgError):
    """A backup is not signed by the zone it says it is of, or is not what was signed."""

    code = "backup_untrusted"
    default_hint = "Use a backup of your own; give the authority of the zone's certificate with --ca."
