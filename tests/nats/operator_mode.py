"""Keys, JWTs and the configuration of a nats-server in operator mode, made by hand."""

from __future__ import annotations

import base64
import binascii
import json
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

OPERATOR, ACCOUNT, USER, SEED = 14 << 3, 0, 20 << 3, 18 << 3
STORAGE = ("mem_storage", "disk_storage", "streams", "consumer")
NO_LIMITS = dict.fromkeys(["subs", "data", "payload", "imports", "exports", "conn", "leaf", *STORAGE], -1)


def _text(raw: bytes) -> str:
    return base64.b32encode(raw + binascii.crc_hqx(raw, 0).to_bytes(2, "little")).decode().rstrip("=")


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Key:
    """A pair of keys of one kind."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self._key = Ed25519PrivateKey.generate()
        self.public = _text(bytes([kind]) + self._key.public_key().public_bytes_raw())
        head = bytes([SEED | kind >> 5, (kind & 31) << 3])
        self.seed = _text(head + self._key.private_bytes_raw())

    def claim(self, subject: Key, name: str, nats: dict[str, Any], **more: Any) -> str:
        """A JWT about a key, signed by this one."""
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        body = {
            "jti": name,
            "iat": int(time.time()),
            "iss": self.public,
            "name": name,
            "sub": subject.public,
            "nats": nats,
            **more,
        }
        text = ".".join(_base64(json.dumps(part).encode()) for part in (head, body))
        return f"{text}.{_base64(self._key.sign(text.encode()))}"


class Operator:
    """An operator with one account. ``configuration`` is for ``nats-server -c``."""

    def __init__(self) -> None:
        self.key, self.account = Key(OPERATOR), Key(ACCOUNT)
        system = Key(ACCOUNT)  # which JetStream needs
        limits = {**NO_LIMITS, "wildcards": True}
        none = {name: value for name, value in limits.items() if name not in STORAGE}
        accounts = {
            key.public: self.key.claim(key, name, {"limits": allowed, "type": "account", "version": 2})
            for key, name, allowed in ((self.account, "robots", limits), (system, "system", none))
        }
        operator = self.key.claim(self.key, "plant", {"type": "operator", "version": 2})
        preloaded = "\n".join(f"{public}: {jwt}" for public, jwt in accounts.items())
        self.configuration = (
            f"operator: {operator}\nsystem_account: {system.public}\nresolver: MEMORY\n"
            f"resolver_preload: {{\n{preloaded}\n}}\n"
        )

    def write_user(self, path: Path, **more: Any) -> Path:
        """A credentials file of a new user. ``more``: other fields of its JWT."""
        user = Key(USER)
        rights = {"subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2}
        jwt = self.account.claim(user, "robot", rights, **more)
        path.touch(0o600)
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            "************************* IMPORTANT *************************\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )
        return path
