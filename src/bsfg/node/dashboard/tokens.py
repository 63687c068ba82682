"""Tokens: what a person without a certificate signs in with.

A token is made by `bsfg token` and by nobody else: its form is checked before its hash, so that no word that somebody
could guess is ever a token. That is why one SHA-256 is enough to keep it by.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping

from bsfg.config import Token

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Digits and letters that cannot be taken for each other: 5 bits each."""

GROUPS, GROUP_CHARACTERS = 5, 5
_FORM = re.compile("bsfg" + f"-[{ALPHABET}]{{{GROUP_CHARACTERS}}}" * GROUPS)
_MISREAD = str.maketrans({"o": "0", "i": "1", "l": "1", "u": "v"})


def make() -> str:
    """Make a token of 125 random bits, in groups that can be read out and typed."""
    groups = ("".join(secrets.choice(ALPHABET) for _ in range(GROUP_CHARACTERS)) for _ in range(GROUPS))
    return "-".join(("bsfg", *groups))


def hash_of(token: str) -> str:
    """Give the hash that stands in the configuration."""
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def cleaned(text: str) -> str | None:
    """Give the token that somebody typed, None when it has not the form of one; case and misread letters are kind."""
    token = "".join(text[:200].split()).lower().translate(_MISREAD)
    return token if _FORM.fullmatch(token) else None


class Tokens:
    """The tokens of a zone."""

    def __init__(self, rows: Mapping[str, Token]) -> None:
        self._rows = rows

    def __bool__(self) -> bool:
        return bool(self._rows)

    def take(self, rows: Mapping[str, Token]) -> None:
        """Go by other rows from now on."""
        self._rows = rows

    def mark_of(self, name: str) -> str | None:
        """Give what a session of a token depends on: another token under its name, or another role, is another mark."""
        row = self._rows.get(name)
        return None if row is None else f"{row.hash} {row.role}"

    def name_of(self, text: str) -> str | None:
        """Give the name of the row whose token this is; the time it takes does not depend on which one it is."""
        token = cleaned(text)
        shown = hash_of(token or "")
        found = None
        for name, row in self._rows.items():
            if hmac.compare_digest(row.hash, shown):
                found = name
        return found if token is not None else None
