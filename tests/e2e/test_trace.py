"""The tool that follows a fact through the source: its doors exist, and it tells the fact from what is beside it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from tools.trace import DOORS, PRODUCT, ROOT, Entry, Leg


def test_the_doors_are_there() -> None:
    """A leg begins at a function that exists; one that was renamed would be missing from the record without a word."""
    for file, function in DOORS:
        assert re.search(rf"^ *(async )?def {function}\(", (PRODUCT / file).read_text(), re.MULTILINE), (file, function)


def test_what_is_counted() -> None:
    """Files in order with their functions, calls without what only goes on, each pair across packages once."""
    entered = [
        ("sdk/producer.py", "append", "", True),
        ("fact.py", "of", "sdk/producer.py", True),
        ("fact.py", "check", "fact.py", True),
        ("fact.py", "of", "sdk/producer.py", True),
        ("model.py", "breaks", "fact.py", True),
        ("sdk/sender.py", "run", "wire/streams.py", False),
    ]
    leg = Leg.of("any", "append", [Entry("append", at, *each) for at, each in enumerate(entered)])
    assert list(leg.files.items()) == [
        ("sdk/producer.py", ["append"]),
        ("fact.py", ["of", "check"]),
        ("model.py", ["breaks"]),
        ("sdk/sender.py", ["run"]),
    ]
    assert (leg.calls, leg.changes) == (5, 1)


def test_an_append_is_followed_into_the_disk() -> None:
    """From the producer over the wire into the writer's thread, and nothing of what the node does by itself."""
    command = [sys.executable, "-m", "tools.trace", "--append", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    [leg] = json.loads(done.stdout)
    files = list(leg["files"])
    way = ["sdk/producer.py", "wire/streams.py", "node/service.py", "journey/append.py", "stores/log/writer.py"]
    assert [file for file in files if file in way] == way
    assert "append_group" in leg["files"]["stores/log/writer.py"]
    assert "sync" in leg["files"]["stores/log/files.py"]
    assert not {"node/upkeep.py", "journey/serve.py", "journey/truncate.py"} & set(files)
    assert leg["calls"] >= len(files)
