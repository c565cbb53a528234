"""Where a client may be sent: not away from the endpoint that the user chose.

Problem: an answer can name another host. aiohttp follows a ``Location`` header by itself, with a signature that
can't fit there, and botocore asks the public cloud for the region of a bucket that lives on a private store. A save
then talks to a host that nobody configured (the kind of case 76).

Way taken: aiohttp is told not to follow, which leaves redirects to botocore; and a last look before every request
refuses one to a host outside of the endpoint's domain. Within it, botocore may follow a bucket to its region.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from dcpfs.errors import StorageError

__all__ = ["is_same_domain", "refuse_other_domains", "without_redirects"]

logger = logging.getLogger(__name__)


class _Addressed(Protocol):
    url: str


def is_same_domain(host: str, endpoint_host: str) -> bool:
    """Whether a host belongs to an endpoint: itself, a name below it, or one beside it in the same domain."""
    host, endpoint_host = host.lower().rstrip("."), endpoint_host.lower().rstrip(".")
    if host == endpoint_host or host.endswith(f".{endpoint_host}"):
        return True
    domain = _domain(endpoint_host)
    return bool(domain) and _domain(host) == domain


def _domain(host: str) -> str:
    """The part that one owner registers, nearly enough: two labels, or three below a country (``com.cn``)."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        labels = host.split(".")
        count = 3 if len(labels[-1]) == 2 and len(labels) > 3 else 2
        return ".".join(labels[-count:]) if len(labels) >= count else ""
    return ""


def refuse_other_domains(endpoint_url: str) -> Callable[..., None]:
    """A handler for botocore's ``before-send`` that lets requests through only to an endpoint's domain."""
    endpoint_host = urlsplit(endpoint_url).hostname or ""

    def check(request: _Addressed, **_: object) -> None:
        host = urlsplit(request.url).hostname or ""
        if not is_same_domain(host, endpoint_host):
            raise StorageError(
                f"Can't follow {endpoint_host} to {host}: it is not in the endpoint's domain; check endpoint_url and "
                "region in storage_options"
            )

    return check


def without_redirects(session_class: object) -> object:
    """A subclass of aiobotocore's aiohttp session that follows no redirects; anything else as it is."""
    from aiobotocore.httpsession import AIOHTTPSession

    if not isinstance(session_class, type) or not issubclass(session_class, AIOHTTPSession):
        return session_class
    if not hasattr(session_class, "_get_session"):
        logger.debug("This aiobotocore has no place to forbid redirects in")
        return session_class

    class NoRedirects(cast("Any", session_class)):  # type: ignore[misc]  # aiobotocore has no types
        """The same session; each of its requests answers for itself."""

        async def _get_session(self, *arguments: object) -> object:
            return _Direct(await super()._get_session(*arguments))

    return NoRedirects


class _Direct:
    """An aiohttp session whose requests are not redirected."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, **options: object) -> object:
        """Send one request."""
        return await self._session.request(method, **{**options, "allow_redirects": False})
