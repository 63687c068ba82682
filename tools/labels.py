"""What the web site of the documentation needs beyond its pages: cells that are named, and options in one piece.

MkDocs calls it (`hooks` in mkdocs.yml). On a telephone a row of a table is read from top to bottom (docs/site.css), and
each cell says what it is. The first is what the row is about; where there is but one other, nobody asks.
"""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_OPTION = re.compile(r"<code>(--?[\w-]{1,26})</code>")
_CELL = re.compile(r"<td(?P<rest>[^>]*)>(?P<text>.*?)</td>", re.DOTALL)


def on_page_content(html: str, **page: Any) -> str:
    """Label the cells of a page's tables, and keep options in one line: a browser would end it behind `--`."""
    return _TABLE.sub(_labelled, _OPTION.sub(r'<code class="whole">\1</code>', html))


def _labelled(found: re.Match[str]) -> str:
    # A bar that ends no cell is written with a backslash, which the Markdown of the site leaves in code.
    table = found[0].replace("\\|", "|")
    names = [unescape(re.sub(r"<[^>]+>", "", each)) for each in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]
    if len(names) < 3:
        return table
    rows = table.split("<tr>")
    return "<tr>".join(_row(row, names) for row in rows)


def _row(row: str, names: list[str]) -> str:
    column = -1

    def cell(found: re.Match[str]) -> str:
        nonlocal column
        column += 1
        if not (column and names[column] and found["text"]):
            return found[0]
        return f'<td{found["rest"]} data-label="{escape(names[column])}">{found["text"]}</td>'

    return _CELL.sub(cell, row)
