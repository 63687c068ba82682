"""What went wrong inside Spark, in the words of the error that a task or commit raised."""

from __future__ import annotations

import re

from bsfg.errors import BsfgError, RemoteError
from bsfg.spark.session import failed

_RAISED = re.compile(r"^bsfg\.errors\.(?:\w+\.)?(\w+): (.*?)^(\w+): ([^\n]*)$", re.MULTILINE | re.DOTALL)


def told_by_spark(error: BaseException) -> BsfgError:
    """Find the error of ours in what Spark says, or give one that says that Spark itself failed.

    Spark passes on only the text of a Python traceback; `bsfg.spark.told` sees to it that code and hint are in it.
    """
    if isinstance(error, BsfgError):
        return error
    text = str(error)
    for found in reversed(_RAISED.findall(text)):
        _, message, code, hint = found
        kind = BsfgError.registry.get(code)
        if kind is not None and kind is not RemoteError:
            return kind(message.strip(), hint=hint)
    return failed("a step of the ingest failed on Spark", text or type(error).__name__)
