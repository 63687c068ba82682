"""Checks of the node's certificate, and of those that lie beside it."""

from __future__ import annotations

from collections.abc import Iterator

from bsfg.cli.doctor.findings import Finding, Level, Says, Subject, counted

_says = Says("certificates")


def certificates(subject: Subject) -> Iterator[Finding]:
    """Look at chain, dates, key, usage and names of the node's certificate, and at the dates of its users'."""
    from bsfg.cli.certs import check_config

    levels = {"ok": Level.OK, "warning": Level.WARNING, "error": Level.PROBLEM}
    for found in check_config(subject.config, subject.now):
        yield Finding(levels[found.level], _says.check, found.says, found.do)
    yield from _users(subject)


def _users(subject: Subject) -> Iterator[Finding]:
    from bsfg.errors import BsfgError
    from bsfg.wire.certcheck import Expiry, lifetime
    from bsfg.wire.certs import load_certificates

    config, files = subject.config, subject.tls_files
    if files is None:
        return
    checked = 0
    for name in config.identities:
        path = files.certificate.parent / f"{name}.crt"
        if not path.is_file() or path == files.certificate:
            continue
        try:
            life = lifetime(load_certificates(path)[0], subject.now, config.tls.expiry_warning_seconds)
        except BsfgError as error:
            yield _says.warning(error.message, error.hint)
            continue
        checked += 1
        renew = f"bsfg certs issue {path.parent} {name} --force, or have your authority renew it."
        if life.expiry == Expiry.EXPIRED:
            yield _says.warning(f"the certificate of {name} has expired", renew)
        elif life.expiry == Expiry.WARNING:
            yield _says.warning(f"the certificate of {name} expires in {life.left_days} days", renew)
        elif life.expiry == Expiry.NOT_YET_VALID:
            yield _says.warning(f"the certificate of {name} is not valid yet", "Check this machine's clock.")
    if checked:
        yield _says.ok(f"{counted(checked, 'certificate')} of callers beside the node's can be read")
