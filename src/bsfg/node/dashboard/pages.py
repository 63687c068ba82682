"""The files of the dashboard, and the headers that keep a page from being misused."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from bsfg.printable import markup

MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
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


@dataclass(frozen=True, slots=True)
class File:
    """One file, read once."""

    data: bytes
    media_type: str
    etag: str


class Files:
    """All files of the dashboard, by their path below ``static``; nothing else can be asked for."""

    def __init__(self) -> None:
        self._files = dict(_found(files("bsfg.node.dashboard") / "static", ""))

    def get(self, path: str) -> File | None:
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

    def page(self, name: str, status: int = 200, **texts: str) -> Response:
        """Answer with a page, in which ``{{name}}`` stands for a text."""
        content = self._files[name].data.decode()
        for key, text in texts.items():
            content = content.replace("{{" + key + "}}", markup(text))
        headers = {**SAFE_HEADERS, "cache-control": "no-store"}
        return Response(content, status, headers, media_type=MEDIA_TYPES["html"])


def _found(folder: Traversable, prefix: str) -> list[tuple[str, File]]:
    found = []
    for each in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = f"{prefix}{each.name}"
        kind = MEDIA_TYPES.get(each.name.rpartition(".")[2])
        if each.is_dir():
            found += _found(each, f"{path}/")
        elif kind is not None:
            data = each.read_bytes()
            found.append((path, File(data, kind, f'"{hashlib.sha256(data).hexdigest()[:24]}"')))
    return found
