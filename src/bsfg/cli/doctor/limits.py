"""Checks of what the system allows a node."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from bsfg.cli.doctor.findings import Finding, Says, Subject
from bsfg.cli.output import count_text

FILES_BASE = 256
"""What a node needs for itself, however many streams it has: idle ones hold no file."""

_says = Says("limits")


def limits(subject: Subject) -> Iterator[Finding]:
    """Look at the number of files and connections that the node may have open."""
    config, pid = subject.config, subject.writer_pid
    wanted = FILES_BASE + 2 * config.limits.connections
    allowed = _of_process(pid) if pid is not None else None
    whose = "the running node" if allowed is not None else "a node started from here"
    if allowed is None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY or allowed >= wanted:
        shown = "any number of" if allowed == resource.RLIM_INFINITY else count_text(allowed)
        yield _says.ok(f"{whose} may open {shown} files; it may need {count_text(wanted)}")
        return
    do = "ulimit -n 65536 before the start, or LimitNOFILE=65536 in its systemd unit; or lower connections in [limits]."
    yield _says.warning(f"{whose} may open only {count_text(allowed)} files, it may need {count_text(wanted)}", do)


def _of_process(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/limits").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Max open files"):
            word = line.split()[3]
            return resource.RLIM_INFINITY if word == "unlimited" else int(word)
    return None
