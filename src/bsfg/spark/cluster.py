"""What a cluster is told beside the settings of a session: that its calls are sealed, and where the package is.

The certificates of a pipeline travel to the tasks with their work, over the calls between Spark's processes. So on
every master but a local one these calls are authenticated and encrypted, by a secret that is in nobody's settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bsfg.errors import ClusterInClear, InvalidArgument

OURS_PREFIX = "spark.bsfg."
SECRET_FILE, ALLOW_CLEAR = f"{OURS_PREFIX}secretFile", f"{OURS_PREFIX}allowClearRpc"
"""Settings of ours beside Spark's, which Spark is never told of."""

SECRET_SETTING = "spark.authenticate.secret"
SECRET_VARIABLE = "_SPARK_AUTH_SECRET"
"""Where Spark itself looks for a secret before it looks at its settings; a worker gives it to its executors so."""

NOT_HERE = "in-the-environment"
"""Spark asks for the setting to be there, and never reads it while the variable is."""

SECRET_CHARACTERS_MIN = 16

SEALED: Mapping[str, str] = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.authEngineVersion": "2",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    "spark.network.crypto.saslFallback": "false",
    "spark.io.encryption.enabled": "true",
}
"""Without the last but one Spark would speak in clear with whoever says that he knows no encryption."""

MUST_BE_ON = ("spark.authenticate", "spark.network.crypto.enabled", "spark.io.encryption.enabled")
MUST_BE_OFF = ("spark.network.crypto.saslFallback",)
OWN_SECRET = ("yarn", "k8s://")
"""Masters for which Spark makes a secret for each run, and takes it to the executors itself."""


def is_local(master: str) -> bool:
    """Tell whether a master means this process alone."""
    return master == "local" or master.startswith("local[")


def sparks_own(conf: Mapping[str, str]) -> dict[str, str]:
    """Give the settings that are Spark's."""
    return {name: value for name, value in conf.items() if not name.startswith(OURS_PREFIX)}


def sealing(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Give the settings that have a cluster's calls authenticated and encrypted; none where that was declined.

    Raises `ClusterInClear` when it cannot be, and was not declined: settings that switch it off, or no secret.
    """
    if SECRET_SETTING in conf:
        raise InvalidArgument(
            f"{SECRET_SETTING} would be seen by everybody who lists processes",
            hint="Write the secret to a file that this user alone can read, and name that with --secret-file.",
        )
    if is_local(master) or conf.get(ALLOW_CLEAR) == "true":
        return {}
    wrong = [name for name in MUST_BE_ON if conf.get(name, "true") != "true"]
    wrong += [name for name in MUST_BE_OFF if conf.get(name, "false") != "false"]
    if wrong:
        raise ClusterInClear(f"{wrong[0]}={conf[wrong[0]]} would have the keys of this zone cross the network in clear")
    if needs_secret(master):
        _ = secret_of(master, conf)
        return {**SEALED, SECRET_SETTING: NOT_HERE}
    return dict(SEALED)


def needs_secret(master: str) -> bool:
    """Tell whether the machines of a cluster share a secret that must be known here, too."""
    return not is_local(master) and not master.startswith(OWN_SECRET)


def secret_of(master: str, conf: Mapping[str, str]) -> str:
    """Give the secret of a cluster, from the file that is named or from the environment."""
    named = conf.get(SECRET_FILE) or os.environ.get("BSFG_SPARK_SECRET_FILE")
    if named:
        try:
            secret = Path(named).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise InvalidArgument(f"the secret of the cluster cannot be read from {named}: {why}") from None
    else:
        secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret and not named:
        raise ClusterInClear(f"{master} was given without the secret by which its machines know each other")
    if len(secret) < SECRET_CHARACTERS_MIN:
        raise InvalidArgument(
            f"the secret of the cluster has {len(secret)} characters, {SECRET_CHARACTERS_MIN} are the least",
            hint="Make one with: openssl rand -hex 32",
        )
    return secret


@contextmanager
def secret_in_use(master: str, conf: Mapping[str, str]) -> Iterator[None]:
    """Have what is started meanwhile find the secret of a cluster in its environment, which no other user can read."""
    if not needs_secret(master) or conf.get(ALLOW_CLEAR) == "true":
        yield
        return
    before = os.environ.get(SECRET_VARIABLE)
    os.environ[SECRET_VARIABLE] = secret_of(master, conf)
    try:
        yield
    finally:
        if before is None:
            del os.environ[SECRET_VARIABLE]
        else:
            os.environ[SECRET_VARIABLE] = before
