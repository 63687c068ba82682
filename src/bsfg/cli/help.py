"""`bsfg help`: the guides and references that come with the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bsfg.cli.common import argument, suggestion
from bsfg.cli.output import console, examples, table
from bsfg.errors import InvalidArgument
from bsfg.wording import help_folder, printable, title_of, without_marks

app = typer.Typer(
    epilog=examples(
        ("bsfg help", "list the topics"),
        ("bsfg help quickstart", "two zones in five minutes"),
        ("bsfg help configuration", "every key of zone.toml"),
        ("bsfg help errors", "every error code, and what to do about it"),
        ("bsfg help backup | less", "as it was written"),
    )
)


@app.command("help")
def show(
    topic: Annotated[
        str | None,
        argument("TOPIC", "What to read; all topics are listed when left out.", autocompletion=lambda: sorted(pages())),
    ] = None,
) -> None:
    """Show a page of the documentation; it comes with the package and needs no network.

    On a terminal the page is set for it; elsewhere it is written as it is, in Markdown.
    """
    known = pages()
    if topic is None:
        listed = table("topic", "what it is")
        for name, path in known.items():
            listed.add_row(name, title_of(path))
        console().print(listed)
        return
    name = topic.removesuffix(".md")
    if name not in known:
        hint = f"{suggestion(name, known, 'page')} `bsfg help` lists all."
        raise InvalidArgument(f"there is no page about {topic!r}", hint=hint)
    text = without_marks(known[name].read_text(encoding="utf-8"))
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        console().print(Markdown(text))
    else:
        sys.stdout.write(printable(text))


def pages() -> dict[str, Path]:
    """Give the pages by the names of their topics, in the order of their kinds."""
    folder = help_folder()
    kinds = (folder, folder / "guides", folder / "concepts", folder / "reference")
    return {path.stem: path for kind in kinds for path in sorted(kind.glob("*.md")) if path.stem != "index"}
