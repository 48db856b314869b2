"""Entry: who may connect to a server, and how. It can be checked before anything is opened, and read again later."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from penstock.address import check_host, is_loopback
from penstock.broker.endpoint import tls_context
from penstock.broker.rights import Tokens
from penstock.errors import InvalidArgument, PenstockError

log = logging.getLogger("penstock.broker")


class Entry:
    """The tokens, the server's side of TLS, and whether clients that do not say HELLO are served; or it raises."""

    def __init__(
        self,
        host: str,
        *,
        tokens: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        client_authority: str | Path | None = None,
        insecure: bool = False,
    ) -> None:
        if certificate is None and (key is not None or client_authority is not None):
            name = "key" if key is not None else "client_authority"
            raise InvalidArgument(f"{name}= goes with certificate=: without that nothing is encrypted or checked")
        check_host(host)
        self.tokens = Tokens(Path(tokens) if tokens else None)
        self._host = host
        self._options: dict[str, Any] = {"tokens": tokens, "certificate": certificate, "key": key}
        self._options |= {"client_authority": client_authority, "insecure": insecure}
        self._loopback = is_loopback(host)
        if not (self._loopback or self.tokens.required or insecure):
            raise InvalidArgument(
                f"{host} is reachable from other machines: give --tokens (and --certificate), or say --insecure"
            )
        self.raw_allowed = not self.tokens.required and (self._loopback or insecure)
        self.tls = tls_context(certificate, key, client_authority)

    def warn(self) -> None:
        """Tell what is allowed and should not be."""
        if self.tokens.required and not self._loopback and self.tls is None:
            log.warning(
                "tokens travel in clear to %s; give --certificate, so that nobody on the way reads them", self._host
            )

    def renewed(self) -> Entry:
        """An entry with the files as they are now. If they cannot be used, that is logged and this one stays."""
        try:
            return Entry(self._host, **self._options)
        except (OSError, PenstockError) as error:
            log.error("tokens and certificate were not read again, the old ones stay: %s", error)
            return self
