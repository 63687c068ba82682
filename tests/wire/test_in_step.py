"""What is generated is in step with what it is generated from, and names that users rely on are written down."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from bsfg.node.logs import EVENTS
from bsfg.wire.messages import ADMIN, BOUNDARY, snake

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
FILES = ("boundary.proto", "admin.proto")


def test_generated_messages_are_in_step(tmp_path: Path) -> None:
    """Compiling the protocol files again gives the modules that are checked in (else: `make proto`)."""
    sources = [f"src/bsfg/wire/{name}" for name in FILES]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Isrc", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([*command, *sources], cwd=ROOT, check=True)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2.py*"))
    assert len(made) == 2 * len(FILES)
    for path in made:
        assert (tmp_path / path).read_bytes() == (SOURCE / path).read_bytes(), f"{path} is old: run `make proto`"


def test_every_method_is_described() -> None:
    """Each method of the services has a comment in the protocol file, and each is answered by the servers."""
    from bsfg.node.adminserver import AdminServicer
    from bsfg.node.server import BoundaryServicer

    for methods, servicer in ((BOUNDARY, BoundaryServicer), (ADMIN, AdminServicer)):
        for name in methods:
            assert callable(getattr(servicer, snake(name)))


def events_in(path: Path) -> set[str]:
    """Find the events that a module logs: the first argument of log.info and the like, and of a `note`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
            continue
        called = ast.unparse(node.func)
        if re.fullmatch(r"log\.(debug|info|warning|error|exception)|(self\.)?_?note", called):
            found.add(str(node.args[0].value))
    return found


def test_log_events_are_written_down() -> None:
    """Every event that wire, node and journey log has its meaning in the list, and nothing else is listed."""
    modules = [path for part in ("wire", "node", "journey") for path in (SOURCE / "bsfg" / part).rglob("*.py")]
    logged = set().union(*map(events_in, modules)) | {"library"}
    assert logged == set(EVENTS)
