"""Certificates from files to what gRPC and HTTP servers take. Knows no sockets."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from engine.errors import ConfigError
from router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The same identity and the same demand on clients, for both protocols."""

    grpc: grpc.ServerCredentials = field(repr=False)
    http: ssl.SSLContext = field(repr=False)


def load_server_tls(config: RouterConfig) -> ServerTls | None:
    """None if the router is to serve without. Raises `ConfigError` that names the setting and the file."""
    if not config.tls_cert:
        return None
    chain, key = _read("tls_cert", config.tls_cert), _read("tls_key", config.tls_key)
    client_ca = _read("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls_cert {config.tls_cert} and tls_key {config.tls_key} are no PEM pair: {_reason(error)}"
        ) from None
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            raise ConfigError(f"tls_client_ca {config.tls_client_ca} is no PEM: {_reason(error)}") from None
    credentials = grpc.ssl_server_credentials([(key, chain)], client_ca, require_client_auth=client_ca is not None)
    return ServerTls(credentials, context)


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error


def _no_password() -> str:
    """Without it, OpenSSL would ask for one on the terminal."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or str(error)
