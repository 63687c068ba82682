"""Errors of identity, rights and the settings that give them."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


class ConfigInvalid(BsfgError):
    """The configuration file cannot be used; ``details`` list every problem with its key and line."""

    code = "config_invalid"
    default_hint = "Correct the lines named above; `bsfg help configuration` describes every key."


class IdentityUnknown(BsfgError):
    """The caller's certificate names nobody in the table of identities."""

    code = "identity_unknown"
    default_hint = "Add the certificate's name to [identities] with its zone and roles, or use another certificate."


class IdentityRevoked(BsfgError):
    """The caller's identity was revoked or has expired in the table of identities, or its authority withdrew it."""

    code = "identity_revoked"
    default_hint = "Issue a certificate with a new name and add it to [identities]; a revoked name stays revoked."


class PermissionRefused(BsfgError):
    """The caller is known but may not do this; ``details`` name the rule that refused."""

    code = "permission_denied"
    default_hint = "Give the identity the role, stream or zone named in the message, if it is meant to have it."


class SignInRequired(BsfgError):
    """The caller has shown neither a certificate nor a token that counts, or his session has ended."""

    code = "sign_in_required"
    default_hint = "Use a client certificate, sign in to the dashboard with a token, or send the token as a bearer."


class HostUnknown(BsfgError):
    """A request over HTTP names a host that this node is not called by."""

    code = "host_unknown"
    default_hint = "Use the node's address or a name in its certificate, or add the name to [listen] http_names."


class CertificateInvalid(BsfgError):
    """A certificate, key or authority file cannot be used as configured."""

    code = "certificate_invalid"
    default_hint = "Run `bsfg certs check --config zone.toml` to see what is wrong with which file."


class ServerIdentityMismatch(BsfgError):
    """The server that answered is not the one that was meant."""

    code = "server_identity_mismatch"
    default_hint = "Check the address first; change server_identity only if the certificate shown is the right one."


class PeerUnreachable(BsfgError):
    """No connection to the other side could be made."""

    code = "peer_unreachable"
    retryable = True
    default_hint = "Check that the node runs, the address and port, and the firewall between the zones."


class TlsNotHardened(BsfgError):
    """The gRPC library was loaded before TLS 1.2 could be switched off in it."""

    code = "tls_not_hardened"
    default_hint = "Import bsfg before grpc."


class FileExists(BsfgError):
    """A file that would be written is already there."""

    code = "file_exists"
    default_hint = "Choose another folder or name, or overwrite it with --force."
