"""The PDF of a work order: one page of text, small and whole."""

from __future__ import annotations

from collections.abc import Sequence


def page(lines: Sequence[str]) -> bytes:
    """Write lines of Latin text as a PDF of one page; the first is the title."""
    texts = [_shown(line, 20 if not number else 12) for number, line in enumerate(lines)]
    content = b"BT 72 770 Td 24 TL\n" + b"\n".join(texts) + b"\nET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    return _file(objects)


def _shown(line: str, points: int) -> bytes:
    text = line.encode("cp1252", "replace")
    for special in (b"\\", b"(", b")"):
        text = text.replace(special, b"\\" + special)
    return b"/F1 %d Tf (%s) Tj T*" % (points, text)


def _file(objects: Sequence[bytes]) -> bytes:
    result, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(result))
        result += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(result))
    return result + b"xref\n0 %d\n0000000000 65535 f \n%s%s" % (len(objects) + 1, table, trailer)
