"""The files of the dashboard, and the documentation that comes with the package as pages of it.

A page of the documentation is made of its Markdown when somebody asks for it: the package holds each page once, and a
browser in a plant needs no other place. Every alarm and every code that stands first in a row of a table has a name in
its page, so that a link can lead to it.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from starlette.requests import Request
from starlette.responses import Response

from bsfg.wording import help_folder, markup, title_of, without_marks

MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "png": "image/png",
    "svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        # No script of ours ever makes markup out of text; with this none can.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

SAFE_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    # Not `no-referrer`: with that a browser hides the origin of our own form.
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
}

DOCS = "/dashboard/docs/"
_KINDS = (("", "Start"), ("guides", "Guides"), ("concepts", "Concepts"), ("reference", "Reference"))


@dataclass(frozen=True, slots=True)
class DashboardFile:
    """One file, read once."""

    data: bytes
    media_type: str
    etag: str


class DashboardFiles:
    """All files of the dashboard, by their path below ``static``; nothing else can be asked for."""

    def __init__(self) -> None:
        self._files = dict(_found(files("bsfg.node.dashboard") / "static", ""))

    def get(self, path: str) -> DashboardFile | None:
        """Give a file, None when there is none."""
        return self._files.get(path)

    def answer(self, request: Request, path: str) -> Response:
        """Answer with a file; a browser that has it keeps it, but asks each time whether it is still the same."""
        file = self._files.get(path)
        if file is None or path.endswith(".html"):
            return Response(status_code=404, headers=SAFE_HEADERS)
        headers = {**SAFE_HEADERS, "cache-control": "no-cache", "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.media_type)

    def page(self, name: str, status: int = 200, made: dict[str, str] | None = None, **texts: str) -> Response:
        """Answer with a page, in which ``{{name}}`` stands for a text, or for markup that was ``made`` here."""
        content = self._files[name].data.decode()
        for key, text in texts.items():
            content = content.replace("{{" + key + "}}", markup(text))
        for key, text in (made or {}).items():
            content = content.replace("{{" + key + "}}", text)
        headers = {**SAFE_HEADERS, "cache-control": "no-store"}
        return Response(content, status, headers, media_type=MEDIA_TYPES["html"])


def _found(folder: Traversable, prefix: str) -> list[tuple[str, DashboardFile]]:
    found = []
    for each in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = f"{prefix}{each.name}"
        kind = MEDIA_TYPES.get(each.name.rpartition(".")[2])
        if each.is_dir():
            found += _found(each, f"{path}/")
        elif kind is not None:
            data = each.read_bytes()
            found.append((path, DashboardFile(data, kind, f'"{hashlib.sha256(data).hexdigest()[:24]}"')))
    return found


class DocPages:
    """The documentation as pages: their names are known when the node starts, their texts are read when asked for."""

    def __init__(self) -> None:
        self._folder = help_folder()
        found = sorted(self._folder.rglob("*")) if self._folder.is_dir() else []
        paths = {path.relative_to(self._folder).as_posix(): path for path in found if path.is_file()}
        self._pages = {name.removesuffix(".md"): path for name, path in paths.items() if name.endswith(".md")}
        self._images = {name: path for name, path in paths.items() if name.endswith((".png", ".svg"))}

    def answer(self, shell: DashboardFiles, name: str, zone: str) -> Response:
        """Answer with a page or an image of a page."""
        image = self._images.get(name)
        if image is not None:
            headers = {**SAFE_HEADERS, "cache-control": "no-cache"}
            return Response(image.read_bytes(), headers=headers, media_type=MEDIA_TYPES[name.rpartition(".")[2]])
        name = (name or "index").removesuffix(".md")
        path = self._pages.get(name)
        if path is None:
            text, title = "# There is no such page\n\nThe list beside this has all of them.", "No such page"
        else:
            text, title = without_marks(path.read_text(encoding="utf-8")), title_of(path)
        made = {"nav": self._listed(name), "content": rendered(text, name)}
        return shell.page("docs.html", 200 if path else 404, made, zone=zone, title=title)

    def _listed(self, current: str) -> str:
        """List the pages by their kinds; the decisions are reached from their own list."""
        parts = []
        for kind, heading in _KINDS:
            names = [name for name in self._pages if name.rpartition("/")[0] == kind]
            links = "".join(self._link(name, name == current) for name in names)
            parts.append(f"<h2>{heading}</h2><ul>{links}</ul>")
        more = self._link("adr/README", current.startswith("adr/")) if "adr/README" in self._pages else ""
        return "".join(parts) + (f"<h2>Decisions</h2><ul>{more}</ul>" if more else "")

    def _link(self, name: str, is_current: bool) -> str:
        here = ' aria-current="page"' if is_current else ""
        return f'<li><a href="{DOCS}{markup(name)}"{here}>{markup(_title(self._pages[name]))}</a></li>'


@lru_cache(maxsize=512)
def _title(path: Path) -> str:
    return title_of(path)


@lru_cache(maxsize=64)
def rendered(text: str, name: str) -> str:
    """Make markup of a page: no HTML of its own passes, links lead to pages, headings and codes have names."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(text)
    taken: set[str] = set()
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", _unique(_slug(tokens[at + 1].content), taken))
        elif token.type == "td_open" and tokens[at - 1].type == "tr_open":
            _name_codes(tokens[at + 1].children or (), taken)
        for child in token.children or ():
            _lead(child, name)
            if child.type == "code_inline" and re.fullmatch(r"--?[\w-]{1,26}", child.content):
                child.attrSet("class", "whole")  # a browser would end the line behind the hyphens
    _label_cells(tokens)
    return str(reader.renderer.render(tokens, reader.options, {}))


def _label_cells(tokens: Sequence[Token]) -> None:
    """Give cells the names of their columns, for screens that show a row from top to bottom.

    The first cell is what the row is about, and where there is but one other nobody asks what it is.
    """
    names: list[str] = []
    column = 0
    for at, token in enumerate(tokens):
        if token.type == "thead_open":
            names = []
        elif token.type == "tr_open":
            column = 0
        elif token.type == "th_open":
            names.append(tokens[at + 1].content.replace("`", ""))
        elif token.type == "td_open":
            if column and len(names) > 2 and tokens[at + 1].content and names[column]:
                token.attrSet("data-label", names[column])
            column += 1


def _name_codes(children: Sequence[Token], taken: set[str]) -> None:
    """Give the codes in the first cell of a row their names."""
    for child in children:
        if child.type == "code_inline" and re.fullmatch(r"[a-z][a-z0-9_]*", child.content):
            child.attrSet("id", _unique(child.content, taken))


def _lead(token: Token, name: str) -> None:
    """Let a link or an image lead to where this node has it."""
    key = {"link_open": "href", "image": "src"}.get(token.type)
    if key is None:
        return
    target = str(token.attrGet(key) or "")
    if re.match(r"[a-z]+:|#|/", target):
        return
    path, mark, part = target.partition("#")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)).removesuffix(".md")
    token.attrSet(key, f"{DOCS}{place}{mark}{part}")


def _slug(text: str) -> str:
    """Name a heading as the documentation's own links do."""
    plain = re.sub(r"[^\w\s-]", "", text.replace("`", "").lower()).strip()
    return re.sub(r"[\s-]+", "-", plain)


def _unique(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        number, found = number + 1, f"{name}_{number}"
    taken.add(found)
    return found
