"""Credentials files of NATS (``.creds``): the JWT of a user, and the seed of the key that signs a server's nonce.

The file is read at every connection, so that a new one takes effect. Any thread.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import InvalidArgument

MAX_BYTES = 1 << 20
SEED, USER = 18 << 3, 20 << 3  # the prefixes (seed, user) in the first two bytes of a user's seed
_PART = r"-----BEGIN {0}-----\s+(\S+)\s+-+END {0}-+"
_JWT, _NKEY = re.compile(_PART.format("NATS USER JWT")), re.compile(_PART.format("USER NKEY SEED"))


@dataclass(frozen=True)
class Credentials:
    """What a file says."""

    jwt: str = field(repr=False)
    seed: bytes = field(repr=False)

    def sign(self, nonce: bytes) -> str:
        """The signature of a server's nonce, as ``CONNECT`` has it."""
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError:
            text = "a credentials file needs cryptography: pip install cryptography"
            raise InvalidArgument(f"{text}, or 'penstock[replica]', or 'penstock[nats]'") from None
        signature = Ed25519PrivateKey.from_private_bytes(self.seed).sign(nonce)
        return base64.urlsafe_b64encode(signature).decode().rstrip("=")


def read_credentials(path: str | Path) -> Credentials:
    """Read a file. Refuses one that others may read, and one without a user's JWT and seed."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise InvalidArgument(f"{path}: others may read it; chmod 600 {path}")
        text = file.read(MAX_BYTES).decode("ascii", "replace")
    jwt, seed = _JWT.search(text), _NKEY.search(text)
    if jwt is None or seed is None:
        raise InvalidArgument(f"{path} is no credentials file of NATS: it has no {'seed' if jwt else 'JWT'} of a user")
    found = Credentials(jwt[1], _seed(seed[1], path))
    found.sign(b"")  # what is missing for that is said now
    return found


def _seed(text: str, path: str | Path) -> bytes:
    """The 32 bytes of a seed: base 32 of two bytes that say what it is, the seed, and a checksum."""
    try:
        raw = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError:  # also of a text that is not ASCII
        raw = b""
    whole = len(raw) == 36 and binascii.crc_hqx(raw[:-2], 0) == int.from_bytes(raw[-2:], "little")
    if not whole or raw[0] & 0xF8 != SEED or (raw[0] & 7) << 5 | raw[1] >> 3 != USER:
        raise InvalidArgument(f"{path}: its seed is damaged, or not of a user")
    return raw[2:-2]
