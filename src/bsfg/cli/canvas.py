"""Small pictures without a plotting library: the same few strokes as SVG text or as PNG pixels."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from bsfg.errors import InvalidArgument

Point = tuple[float, float]
FONTS = "system-ui,-apple-system,'Segoe UI',sans-serif"

# Columns of 8 pixels, five to a character, from the space on; the lowest bit is the top.
_GLYPHS = bytes.fromhex(
    "000000000000005f00000007000700147f147f14242a7f2a12231308646236495620500008070300001c2241000041221c00"
    "2a1c7f1c2a08083e080800807030000808080808000060600020100804023e5149453e00427f400072494949462141494d33"
    "1814127f1027454545393c4a49493141211109073649494936464949291e0000140000004034000000081422411414141414"
    "004122140802015909063e415d594e7c1211127c7f494949363e414141227f4141413e7f494949417f090909013e41415173"
    "7f0808087f00417f41002040413f017f081422417f404040407f021c027f7f0408107f3e4141413e7f090909063e4151215e"
    "7f09192946264949493203017f01033f4040403f1f2040201f3f4038403f631408146303047804036159494d43007f414141"
    "0204081020004141417f04020102044040404040000307080020545478407f284444383844444428384444287f3854545418"
    "00087e090218a4a49c787f0804047800447d40002040403d007f1028440000417f40007c047804787c080404783844444438"
    "fc1824241818242418fc7c08040408485454542404043f44243c4040207c1c2040201c3c4030403c44281028444c9090907c"
    "4464544c440008364100000077000000413608000201020402"
)


class Canvas(Protocol):
    """Something to draw on; the origin is the upper left corner, colours are like ``#336699``."""

    def box(self, at: Point, size: Point, colour: str) -> None:
        """Fill a rectangle."""
        ...

    def line(self, points: Sequence[Point], colour: str, *, dashed: bool = False) -> None:
        """Draw a line through points."""
        ...

    def text(
        self, at: Point, text: str, *, colour: str = "#333333", anchor: str = "start", large: bool = False
    ) -> None:
        """Write text beside a point on its base line; ``anchor`` is start, middle or end."""
        ...

    def encoded(self) -> bytes:
        """Give the picture as the content of a file."""
        ...


class SvgCanvas:
    """A picture as SVG."""

    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' font-family="{FONTS}">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, at: Point, size: Point, colour: str) -> None:
        """Fill a rectangle."""
        self._parts.append(
            f'<rect x="{at[0]:.1f}" y="{at[1]:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}" fill="{colour}"/>'
        )

    def line(self, points: Sequence[Point], colour: str, *, dashed: bool = False) -> None:
        """Draw a line through points."""
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<polyline points="{where}" fill="none" stroke="{colour}"{dashes}/>')

    def text(
        self, at: Point, text: str, *, colour: str = "#333333", anchor: str = "start", large: bool = False
    ) -> None:
        """Write text beside a point."""
        size = 15 if large else 11
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def encoded(self) -> bytes:
        """Give the SVG document."""
        return "\n".join([*self._parts, "</svg>", ""]).encode()


class PngCanvas:
    """A picture as pixels, two for each unit, with a small built-in font."""

    def __init__(self, width: int, height: int) -> None:
        self._pixels = np.full((2 * height, 2 * width, 3), 255, dtype=np.uint8)

    def box(self, at: Point, size: Point, colour: str) -> None:
        """Fill a rectangle."""
        left, top = round(2 * at[0]), round(2 * at[1])
        right, bottom = round(2 * (at[0] + size[0])), round(2 * (at[1] + size[1]))
        self._pixels[max(0, top) : max(0, bottom), max(0, left) : max(0, right)] = _rgb(colour)

    def line(self, points: Sequence[Point], colour: str, *, dashed: bool = False) -> None:
        """Draw a line through points."""
        height, width, _ = self._pixels.shape
        for (x0, y0), (x1, y1) in pairwise(points):
            steps = np.arange(2 * int(max(abs(x1 - x0), abs(y1 - y0), 1)) + 1)
            if dashed:
                steps = steps[steps % 18 < 10]
            part = steps / max(1, 2 * int(max(abs(x1 - x0), abs(y1 - y0), 1)))
            x = np.rint(2 * (x0 + part * (x1 - x0))).astype(int).clip(0, width - 2)
            y = np.rint(2 * (y0 + part * (y1 - y0))).astype(int).clip(0, height - 2)
            for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
                self._pixels[y + dy, x + dx] = _rgb(colour)

    def text(
        self, at: Point, text: str, *, colour: str = "#333333", anchor: str = "start", large: bool = False
    ) -> None:
        """Write text beside a point; characters beyond ASCII become a question mark."""
        scale = 3 if large else 2
        codes = text.encode("ascii", "replace")
        columns = b"".join(_GLYPHS[5 * (code - 32) : 5 * (code - 31)] + b"\0" for code in codes if 32 <= code < 127)
        bits = np.unpackbits(np.frombuffer(columns, dtype=np.uint8).reshape(-1, 1), axis=1, bitorder="little").T
        mask = np.kron(bits, np.ones((scale, scale), dtype=np.uint8)).astype(bool)
        shift = {"start": 0, "middle": mask.shape[1] // 2, "end": mask.shape[1]}[anchor]
        left, top = max(0, round(2 * at[0]) - shift), max(0, round(2 * at[1]) - 7 * scale)
        area = self._pixels[top : top + mask.shape[0], left : left + mask.shape[1]]
        area[mask[: area.shape[0], : area.shape[1]]] = _rgb(colour)

    def encoded(self) -> bytes:
        """Give the PNG file."""
        height, width, _ = self._pixels.shape
        # Each line begins with a byte for its filter: none.
        lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)
        lines[:, 1:] = self._pixels.reshape(height, -1)
        head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = (b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def canvas_for(path: Path, width: int, height: int) -> Canvas:
    """Give a canvas of the kind that the name of a file asks for."""
    kind = path.suffix.lower()
    if kind == ".svg":
        return SvgCanvas(width, height)
    if kind == ".png":
        return PngCanvas(width, height)
    raise InvalidArgument(f"{path} is neither .svg nor .png", hint="Give the picture a name that ends in one of them.")
