"""`bsfg artifact`: upload, download and look at the files that facts refer to."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.text import Text

from bsfg.cli.connection import Target, connects
from bsfg.cli.groups import Json
from bsfg.cli.output import console, count_text, examples, print_json, progress_bar, size_text
from bsfg.errors import DigestMismatch, FileExists, InvalidArgument, StorageReadOnly

if TYPE_CHECKING:
    from bsfg.wire.connection import Connection
    from bsfg.wire.service import ObjectInfo

app = typer.Typer(
    no_args_is_help=True,
    help="Upload, download and look at artifacts: the files that facts refer to by digest.",
    epilog=examples(
        ("bsfg artifact put batch-files B1042/report.pdf report.pdf", "upload a file and see its digest"),
        ("tar c logs | bsfg artifact put batch-files B1042/logs.tar -", "from a pipe, of any size"),
        ("bsfg artifact show batch-files B1042/report.pdf", "digest and size"),
        ("bsfg artifact get batch-files B1042/report.pdf copy.pdf", "download it; the digest is checked"),
    ),
)

PIECE_BYTES = 1 << 20
LARGE_BYTES = 8 << 20
STANDARD = "-"

Bucket = Annotated[str, typer.Argument(metavar="BUCKET", help="The bucket, such as batch-files.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The name in the bucket, such as B1042/report.pdf.")]

Advance = Callable[[int], None]


@app.command("put")
@connects("producer", "pipeline")
def put(
    node: Target,
    bucket: Bucket,
    object_key: Key,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to upload; - reads standard input.")],
    media_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Its media type. Default: by the ending of its name.")
    ] = None,
    json: Json = False,
) -> None:
    """Upload a file; when this returns it is durable in the zone, and facts can name it.

    An artifact never changes: other content needs another key. The same content again is fine.
    """
    from bsfg.artifacts import DEFAULT_MEDIA_TYPE
    from bsfg.wire.service import ObjectInfo

    name = None if str(file) == STANDARD else file.name
    kind = media_type or mimetypes.guess_type(name or object_key)[0] or DEFAULT_MEDIA_TYPE
    with _source(file) as source:
        size = os.fstat(source.fileno()).st_size if name else None
        digest = hashlib.sha256()

        async def call(connection: Connection) -> ObjectInfo:
            from bsfg.wire.client import BoundaryClient

            info = ObjectInfo(bucket, object_key, kind, name, size_bytes=size)
            return await BoundaryClient(connection).put_object(info, _pieces(source, digest.update, advance))

        with _progress(f"uploading {file}", size) as advance:
            stored = node.run(call)
    _check_digest(stored.digest, digest.hexdigest(), f"what {node.address} stored")
    _show(stored, json, "was there already" if stored.already_exists else "stored")


@app.command("get")
@connects("consumer", "pipeline")
def get(
    node: Target,
    bucket: Bucket,
    object_key: Key,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Where to write it; - for standard output. Default: the end of its key."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    json: Json = False,
) -> None:
    """Download an artifact; the file appears when all of it is there and its digest is right."""
    target = file or Path(object_key.rsplit("/", 1)[-1])
    to_stdout = str(target) == STANDARD
    if to_stdout and json:
        raise InvalidArgument("--json and the content would both go to standard output", hint="Give a file name.")
    if not to_stdout and target.exists() and not force:
        raise FileExists(f"{target} is already there", path=str(target))
    part = target.with_name(f"{target.name}.part")
    try:
        with nullcontext(sys.stdout.buffer) if to_stdout else part.open("wb") as sink:
            info = node.run(lambda connection: _download(connection, bucket, object_key, sink))
            if not to_stdout:
                os.fsync(sink.fileno())
        if not to_stdout:
            part.replace(target)
            _show(info, json, f"written to {target}")
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise StorageReadOnly(f"{target} cannot be written: {error.strerror}", hint="Choose another place.") from None
    finally:
        part.unlink(missing_ok=True)


@app.command("show")
@connects("consumer", "pipeline")
def show(node: Target, bucket: Bucket, object_key: Key, json: Json = False) -> None:
    """Show an artifact's digest, size and media type, without its content."""

    async def call(connection: Connection) -> ObjectInfo:
        from bsfg.wire.client import BoundaryClient

        info, _ = await BoundaryClient(connection).get_object(bucket, object_key)
        return info

    _show(node.run(call), json, "")


def as_dict(info: ObjectInfo) -> dict[str, Any]:
    """Give the JSON form, which is that of a reference inside a fact."""
    return {
        "bucket": info.bucket,
        "key": info.key,
        "digest": info.digest,
        "size_bytes": info.size_bytes,
        "media_type": info.media_type,
        **({"file_name": info.file_name} if info.file_name else {}),
    }


def _source(file: Path) -> BinaryIO:
    if str(file) == STANDARD:
        return sys.stdin.buffer
    try:
        return file.open("rb")
    except OSError as error:
        raise InvalidArgument(
            f"{file} cannot be read: {error.strerror}", hint="Check the path and its rights."
        ) from None


async def _pieces(source: BinaryIO, note: Callable[[bytes], None], advance: Advance) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(source.read, PIECE_BYTES):
        note(piece)
        yield piece
        advance(len(piece))


async def _download(connection: Connection, bucket: str, key: str, sink: BinaryIO) -> ObjectInfo:
    from bsfg.wire.client import BoundaryClient

    info, content = await BoundaryClient(connection).get_object(bucket, key)
    digest = hashlib.sha256()
    with _progress(f"downloading {key}", info.size_bytes) as advance:
        async for piece in content:
            digest.update(piece)
            sink.write(piece)
            advance(len(piece))
    sink.flush()
    _check_digest(info.digest, digest.hexdigest(), f"what came of {bucket}/{key}")
    return info


@contextmanager
def _progress(text: str, size: int | None) -> Iterator[Advance]:
    """Show a bar on stderr for what takes a while; give what to call with each piece."""
    with progress_bar(text, shown=size is None or size > LARGE_BYTES) as bar:
        task = bar.task_ids[0]
        bar.update(task, total=size)
        yield lambda count: bar.update(task, advance=count)


def _check_digest(said: str | None, found: str, what: str) -> None:
    if said != f"sha256:{found}":
        raise DigestMismatch(f"{what} has the digest {said}, but its content gives sha256:{found}")


def _show(info: ObjectInfo, json: bool, what: str) -> None:
    if json:
        print_json(as_dict(info))
        return
    size = info.size_bytes or 0
    rows = {
        "digest": str(info.digest),
        "size": f"{count_text(size)} bytes" + (f" ({size_text(size)})" if size >= 1024 else ""),
        "media type": info.media_type,
    }
    out = console()
    out.print(Text(f"{info.bucket}/{info.key}", "bold"), soft_wrap=True)
    for name, text in rows.items():
        # A digest that is broken into two lines could not be copied.
        out.print(Text.assemble((f"{name:<10}  ", "cyan"), text), soft_wrap=True)
    if what:
        out.print(Text(what, "green"), soft_wrap=True)
