"""Who may use the router, and how much of it: API keys, the salt of a tenant's prefix cache, token rates.

With no tenants configured everybody is ANYBODY. With tenants a request needs a key of one: what has none, or a wrong
one, is refused before anything of it is read. Keys are 256 random bits, so their plain SHA-256 tells nothing about
them; only that is kept.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from contextvars import ContextVar

from ..proto.errors import Exhausted, Unauthenticated
from .params import TenantParams
from .token_bucket import TokenBucket

ANYBODY = TenantParams(name="", key_hashes=(), weight=1.0, tokens_per_s=None, burst_tokens=None)
current: ContextVar[TenantParams] = ContextVar("tenant", default=ANYBODY)  # of the call that is being served
_BEARER = "bearer "


def key_hash(key: str) -> str:
    """What is kept of a key: hexadecimal SHA-256."""
    return hashlib.sha256(key.encode()).hexdigest()


def salted(tenant: TenantParams, cache_salt: str) -> str:
    """The salt of a request's prefix cache: tenants share nothing, whatever salts they give. Names hold no zero."""
    if not tenant.name:
        return cache_salt
    return hashlib.blake2b(f"{tenant.name}\0{cache_salt}".encode(), digest_size=16).hexdigest()


class Tenants:
    """All tenants of a router. keyless: whose calls without a key are; None: they are refused."""

    def __init__(self, tenants: Sequence[TenantParams], now: float, keyless: TenantParams | None = None) -> None:
        self._keyless = keyless
        self._keys = [(digest.encode(), tenant) for tenant in tenants for digest in tenant.key_hashes]
        self.required = bool(tenants)
        self._buckets = {
            tenant.name: TokenBucket(tenant.tokens_per_s, tenant.burst_tokens or tenant.tokens_per_s, now)
            for tenant in tenants
            if tenant.tokens_per_s is not None
        }

    def authenticate(self, authorization: str) -> TenantParams:
        """The tenant of an `authorization` header ("" = there is none). Raises Unauthenticated.

        Every key is compared, each in constant time: how long it takes says nothing about any of them.
        """
        if not self.required:
            return ANYBODY
        if not authorization and self._keyless is not None:
            return self._keyless
        given = authorization[len(_BEARER) :] if authorization[: len(_BEARER)].lower() == _BEARER else ""
        digest, found = key_hash(given.strip()).encode(), ANYBODY
        for known, tenant in self._keys:
            if hmac.compare_digest(known, digest):
                found = tenant
        if not given or found is ANYBODY:
            why = "this API key is not known" if given else "an API key is needed: authorization: Bearer KEY"
            raise Unauthenticated(why)
        return found

    def charge(self, tenant: str, tokens: int, now: float) -> None:
        """Pays for a request. Raises Exhausted with the time after which its tenant can."""
        bucket = self._buckets.get(tenant)
        wait_s = bucket.take(tokens, now) if bucket is not None else 0.0
        if wait_s:
            raise Exhausted(f"tenant {tenant} is over its rate of tokens", retry_after_s=wait_s)

    def give_back(self, tenant: str, tokens: int, now: float) -> None:
        """Tokens that a request paid for and did not use."""
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            bucket.give_back(tokens, now)
