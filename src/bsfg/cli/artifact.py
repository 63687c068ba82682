"""`bsfg artifact`: upload, download and look at the files that facts refer to."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.text import Text

from bsfg.artifacts import DEFAULT_MEDIA_TYPE, key_problem, own_name
from bsfg.cli.common import Json, argument, flag, option
from bsfg.cli.connection import Target, connects
from bsfg.cli.output import console, count_text, examples, print_json, progress_bar, size_text
from bsfg.errors import ArtifactMissing, DigestMismatch, FactNotFound, InvalidArgument
from bsfg.fact import ArtifactRef, Entry
from bsfg.fact import Key as FactKey
from bsfg.ports import Buffer
from bsfg.wording import one_line

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
        ("bsfg artifact get sha256:… -o report.pdf", "by the digest that a fact names, in any zone"),
        ("bsfg artifact get --stream documents --fact plant-a/evt-7 -o report.pdf", "or by the fact itself"),
    ),
)

PIECE_BYTES = 1 << 20
LARGE_BYTES = 8 << 20
STANDARD = "-"

Bucket = Annotated[str, argument("BUCKET", "The bucket, such as batch-files.")]
Key = Annotated[str, argument("KEY", "The name in the bucket, such as B1042/report.pdf.")]

Advance = Callable[[int], None]


@app.command("put")
@connects("producer", "pipeline")
def put(
    node: Target,
    bucket: Bucket,
    object_key: Key,
    file: Annotated[Path, argument("FILE", "What to upload; - reads standard input.")],
    media_type: Annotated[str | None, option("TYPE", "Its media type. Default: by the ending of its name.")] = None,
    json: Json = False,
) -> None:
    """Upload a file; when this returns it is durable in the zone, and facts can name it.

    An artifact never changes: other content needs another key. The same content again is fine.
    """
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


Which = Annotated[
    list[str] | None, argument("sha256:DIGEST | BUCKET KEY", "The digest, or what this zone calls the artifact.")
]
OfFact = Annotated[str | None, option("ZONE/ID", "The artifact of this fact; or of the one at this offset.", "--fact")]
Stream = Annotated[str | None, option("STREAM", "The stream of the fact.")]
InBuffer = Annotated[Buffer, typer.Option("--buffer", help="The buffer of the fact.")]


@app.command("get")
@connects("consumer", "pipeline")
def get(
    node: Target,
    which: Which = None,
    output: Annotated[
        Path | None, option("FILE", "Where to write it; - for standard output. Default: by its name.", "--output", "-o")
    ] = None,
    fact: OfFact = None,
    stream: Stream = None,
    buffer: InBuffer = Buffer.FORWARD,
    force: Annotated[bool, flag("--force", "Overwrite a file that is there.")] = False,
    json: Json = False,
) -> None:
    """Download an artifact; the file appears when all of it is there and its digest is right.

    By digest or by fact it is what the fact's producer uploaded, in whichever zone that was. A name is what this zone
    calls an artifact, which may be another one than a received fact means. The file may also be given after the name.
    """
    from bsfg.sdk.artifacts import PartFile

    wanted, file = _wanted(which or [], fact, stream, buffer, takes_file=output is None)
    found = node.run(wanted.resolved)
    target = output or file or Path(found.file_name)
    if str(target) == STANDARD:
        if json:
            raise InvalidArgument("--json and the content would both go to standard output", hint="Give a file name.")
        node.run(lambda connection: _download(connection, found, sys.stdout.buffer.write))
        sys.stdout.buffer.flush()
        return
    with PartFile(target, overwrite=force) as sink:
        info = node.run(lambda connection: _download(connection, found, sink.write))
    _show(info, json, f"written to {target}")


@app.command("show")
@connects("consumer", "pipeline")
def show(
    node: Target,
    which: Which = None,
    fact: OfFact = None,
    stream: Stream = None,
    buffer: InBuffer = Buffer.FORWARD,
    json: Json = False,
) -> None:
    """Show an artifact's digest, size and media type, without its content."""
    wanted, _ = _wanted(which or [], fact, stream, buffer, takes_file=False)

    async def call(connection: Connection) -> ObjectInfo:
        info, content = await _opened(connection, await wanted.resolved(connection))
        await content.aclose()
        return info

    _show(node.run(call), json, "")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which artifact is meant: by digest, by name, or by the fact at an offset or with a key."""

    reference: ArtifactRef = field(default_factory=ArtifactRef)
    stream: str = ""
    buffer: Buffer = Buffer.FORWARD
    fact: FactKey | int | None = None

    @property
    def file_name(self) -> str:
        """The end of its key, where that can be the name of a file, or the digits of its digest."""
        name = own_name(self.reference)
        if name is None or key_problem(name[1]):
            return self.reference.digest.removeprefix("sha256:")
        return name[1].rsplit("/", 1)[-1]

    async def resolved(self, connection: Connection) -> _Wanted:
        """Look the fact up, if there is one, and keep its reference."""
        if self.fact is None:
            return self
        entry = await self._entry(connection)
        if entry is None:
            raise FactNotFound(f"there is no such fact in the {self.buffer} buffer of {self.stream}")
        if entry.message.fact.artifact is None:
            raise ArtifactMissing("the fact refers to no artifact", hint="Look at the fact: `bsfg inspect` shows it.")
        return replace(self, reference=entry.message.fact.artifact, fact=None)

    async def _entry(self, connection: Connection) -> Entry | None:
        from bsfg.wire.client import BoundaryClient

        client, fact = BoundaryClient(connection), self.fact
        if isinstance(fact, FactKey):
            return await client.get_fact(self.stream, fact, buffer=self.buffer)
        assert fact is not None
        async for frame in client.read_offsets(self.stream, fact, fact + 1, buffer=self.buffer):
            if frame.entries is not None:
                return frame.entries.to_entries()[0]
        return None


def _wanted(
    names: list[str], fact: str | None, stream: str | None, buffer: Buffer, *, takes_file: bool
) -> tuple[_Wanted, Path | None]:
    """Read the words of a command: which artifact, and perhaps a file at the end."""
    count = 0 if fact is not None else 1 if names and names[0].startswith("sha256:") else 2
    if (fact is None) != (stream is None):
        raise InvalidArgument("--fact and --stream belong together", hint="Give both: --fact plant-a/evt-7 --stream S.")
    if not count <= len(names) <= count + takes_file:
        raise InvalidArgument(
            "say which artifact: a digest, a bucket and a key, or --fact with --stream",
            hint="For example: bsfg artifact get sha256:… -o report.pdf",
        )
    file = Path(names[count]) if len(names) > count else None
    if fact is not None:
        return _Wanted(stream=stream or "", buffer=buffer, fact=_fact(fact)), file
    reference = ArtifactRef(digest=names[0]) if count == 1 else ArtifactRef(names[0], names[1])
    return _Wanted(reference), file


def _fact(text: str) -> FactKey | int:
    zone, slash, message_id = text.partition("/")
    if slash and zone and message_id:
        return FactKey(zone, message_id)
    if text.isascii() and text.isdigit():
        return int(text)
    raise InvalidArgument(f"--fact {text[:80]!r} is neither an offset nor from_zone/message_id")


def as_dict(info: ObjectInfo) -> dict[str, Any]:
    """Give the JSON form, which is that of a reference inside a fact."""
    return {
        **({"bucket": info.bucket, "key": info.key} if info.bucket else {}),
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


async def _opened(connection: Connection, wanted: _Wanted) -> tuple[ObjectInfo, AsyncGenerator[bytes, None]]:
    """Ask for an artifact, by its digest unless only its name in this zone is known."""
    from bsfg.wire.client import BoundaryClient

    reference, client = wanted.reference, BoundaryClient(connection)
    if not reference.digest:
        return await client.get_object(reference.bucket or "", reference.key or "")
    info, content = await client.get_object("", "", digest=reference.digest)
    media_type = reference.media_type or info.media_type
    return replace(info, bucket=reference.bucket or "", key=reference.key or "", media_type=media_type), content


async def _download(connection: Connection, wanted: _Wanted, write: Callable[[bytes], object]) -> ObjectInfo:
    info, content = await _opened(connection, wanted)
    with _progress(f"downloading {wanted.file_name or info.digest}", info.size_bytes) as advance:
        async for piece in content:
            write(piece)
            advance(len(piece))
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
    if info.bucket:
        out.print(Text(one_line(f"{info.bucket}/{info.key}"), "bold"), soft_wrap=True)
    for name, text in rows.items():
        # A digest that is broken into two lines could not be copied.
        out.print(Text.assemble((f"{name:<10}  ", "cyan"), one_line(text)), soft_wrap=True)
    if what:
        out.print(Text(one_line(what), "green"), soft_wrap=True)
