"""How `bsfg pipeline ingest` tells what it did, or what it would do."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.text import Text

from bsfg.cli.output import console, count_text, print_json

if TYPE_CHECKING:
    from bsfg.spark.ingest.dryrun import Look
    from bsfg.spark.ingest.files import Sources
    from bsfg.spark.ingest.plan import Plan
    from bsfg.spark.ingest.work import Counts, Work

SHOWN_REJECTS, SHOWN_FILES = 5, 5


def report(job: Work, sources: Sources, stream: str, seconds: float | None, json: bool) -> Counts:
    """Tell what became of the files since the last report, and note that it was told."""
    counts, files = job.progress.counts, job.open_files()
    first = list(islice(_rejects(job.rejects, job.progress.reported_bytes), SHOWN_REJECTS))
    if json:
        print_json({**_document(job, sources, stream), "seconds": None if seconds is None else round(seconds, 1)})
    else:
        known = len(sources.files) - len(files)
        _tell(job, counts, known, first)
        _tell_left_out(sources)
    job.report()
    return counts


def tell_stopped(job: Work) -> None:
    """Tell how far it came when something stops it."""
    done, left = job.progress.counts.rows, sum(chunk.rows for _, _, chunk in job.ahead())
    text = (
        f"Stopped: {count_text(done)} of {count_text(done + left)} rows are done. The same command goes on from there."
    )
    console(stderr=True).print(Text(text), soft_wrap=True)


def _document(job: Work, sources: Sources, stream: str) -> dict[str, Any]:
    progress = job.progress
    counts = {name: getattr(progress.counts, name) for name in progress.counts.__slots__}
    files = [
        {
            "path": each.path,
            "rows": each.rows,
            "rejected": progress.rejected.get(each.path, 0),
            "digest": f"sha256:{each.digest}" if each.digest else None,
            "problem": each.problem,
        }
        for each in job.open_files()
    ]
    known = max(0, len(sources.files) - len(files))
    kept = {"work": str(job.folder), "rejects": str(job.rejects) if counts["rejected"] else None}
    return {"stream": stream, **counts, **kept, "known_files": known, "left_out": sources.left_out, "files": files}


def _tell(job: Work, counts: Counts, known: int, first: list[dict[str, Any]]) -> None:
    files = job.open_files()
    if not files:
        say(f"Nothing new: {count_text(known)} file{_s(known)} known, all ingested before. --again sends them again.")
        return
    parts = [f"{count_text(counts.inserted)} stored"]
    parts += [f"{count_text(counts.already_exists)} were there already"] if counts.already_exists else []
    parts += [f"{count_text(counts.rejected)} rejected"] if counts.rejected else []
    among = f", {count_text(counts.conflicts)} of them because their id is taken" if counts.conflicts else ""
    say(f"{count_text(len(files))} file{_s(len(files))}, {count_text(counts.rows)} rows: {', '.join(parts)}{among}.")
    if known > 0:
        say(f"{count_text(known)} file{_s(known)} were ingested before.")
    if counts.rejected:
        for reject in first:
            say(f"  {reject_line(reject)}")
        more = counts.rejected - sum(reject.get("rows", 1) for reject in first)
        others = f"And {count_text(more)} more. " if more > 0 else ""
        say(f"{others}All rejected rows, with reasons: {_near(job.rejects)}")


def _tell_left_out(sources: Sources) -> None:
    left = sources.left_out
    if left:
        names = ", ".join(_near(Path(path)) for path in left[:SHOWN_FILES])
        more = f" and {len(left) - SHOWN_FILES} more" if len(left) > SHOWN_FILES else ""
        say(f"Left out, because no format fits their names: {names}{more}.")


def reject_line(reject: dict[str, Any]) -> str:
    """Give a reject in one line."""
    place = _near(Path(reject["file"]))
    place += f":{reject['line']}" if "line" in reject else f" row {reject['row']}" if "row" in reject else ""
    field = f"{reject['field']}: " if "field" in reject else ""
    rows = f"{count_text(reject['rows'])} rows: " if "rows" in reject else ""
    return f"{place}  {reject['code']}  {rows}{field}{reject['reason']}"


def show_look(seen: Look, sources: Sources, plan: Plan, json: bool) -> None:
    """Tell what a dry run saw."""
    rejects = [reject.to_dict() for reject in seen.first_rejects]
    if json:
        repeated = {"count": seen.repeated_ids, "first": seen.first_repeated} if seen.repeated_ids else None
        print_json(
            {
                "dry_run": True,
                "stream": plan.stream,
                "whole": seen.whole,
                "rows": seen.rows,
                "facts": seen.facts,
                "rejected": seen.rejected,
                "first_facts": seen.first_facts,
                "first_rejects": rejects,
                "repeated_ids": repeated,
                "left_out": sources.left_out,
            }
        )
        return
    for fact in seen.first_facts[:1]:
        say(orjson.dumps(fact, option=orjson.OPT_INDENT_2).decode())
    for fact in seen.first_facts[1:]:
        say(orjson.dumps(fact).decode())
    looked = "" if seen.whole else "the first "
    say(f"Of {looked}{count_text(seen.rows)} rows {count_text(seen.facts)} would become facts of {plan.stream}.")
    if seen.rejected:
        say(f"{count_text(seen.rejected)} would be rejected:")
        for reject in rejects:
            say(f"  {reject_line(reject)}")
    if seen.first_repeated is not None:
        id, before, after = seen.first_repeated
        say(
            f"{count_text(seen.repeated_ids)} rows have an id that an earlier row has, the first is {id!r} in {before} "
            f"and {after}: such a row is not stored again, and rejected if it says something else."
        )
    _tell_left_out(sources)
    say("Nothing was sent." if seen.whole else "Nothing was sent. --limit 0 looks at all rows.")


def say(text: str) -> None:
    """Print a line as it is."""
    console().print(Text(text), soft_wrap=True)


def _rejects(path: Path, start: int) -> Any:
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            yield orjson.loads(line)


def _near(path: Path) -> str:
    """Give a path as it is seen from here, when that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


def _s(count: int) -> str:
    return "" if count == 1 else "s"
