"""The bytes behind an http or https URL that a request names: a file of a host that is asked on purpose.

Who writes requests must not reach what this machine reaches. So only hosts that are listed are asked, at addresses of
the public internet, without credentials, proxies, cookies or redirects; and what they answer is an image or sound, or
an error that does not repeat it.
"""

from __future__ import annotations

import io
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from http.client import HTTPConnection, HTTPException
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.media.limits import MAX_URL_CHARS, MediaLimits
from kerngen.system.cancellation import Cancellation

# All of an http or https URL that is accepted: what is checked is what is asked, since nothing else reads it. A host's
# name or address, port 80 or 443, and a path of printable ASCII without \ ; a fragment stays here.
_HTTP_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(?P<port>80|443))?"
    r"(?P<target>[/?][!-\"$-\[\]-~]*)?(?:#[!-\[\]-~]*)?",
    re.IGNORECASE | re.ASCII,
)
_CONNECT_S = 3.0  # to one of a host's addresses, if it has another
_CHUNK_BYTES = 1 << 16
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close", "User-Agent": "kerngen"}
_ALLOCATED_V6 = ip_network("2000::/3")  # all of IPv6 that the internet routes
# What some Python calls global and no host has for itself: protocols' own and 6to4's relays; Teredo, benchmarks and
# their like; 6to4, which holds an IPv4 address; documentation.
_OTHER = [ip_network(n) for n in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")]

Resolve = Callable[[str, int], Sequence[str]]


class _Failed(Exception):
    """Why a URL could not be fetched: for logs, as the cause of what a client is told."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What a URL names. host: in lower case, an IPv6 address in brackets."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def host_header(self) -> str:
        return self.host if self.port == (443 if self.scheme == "https" else 80) else f"{self.host}:{self.port}"


def read_url(url: str, max_bytes: int, limits: MediaLimits, work: Cancellation | None = None) -> bytes:
    """The bytes that `url` names, at most `max_bytes`: http or https, of one of `limits.hosts`.

    Raises UsageError for another URL, for more bytes, and for what is not there within `limits.fetch_s`. It does not
    say what a host answered; its cause does. Raises CancelledError where `work` is cancelled meanwhile.
    """
    place = _place_of(url)
    if place.host not in limits.hosts:
        raise UsageError(
            f"files of {place.host} are not fetched", hint="send the file itself, as a data: URL with base64"
        )
    return _fetch(place, max_bytes, limits.fetch_s, work)


def _place_of(url: str) -> _Place:
    if len(url) > MAX_URL_CHARS:
        raise UsageError(f"the URL has {len(url):,} characters: more than {MAX_URL_CHARS:,}")
    if (found := _HTTP_URL.fullmatch(url)) is None:
        raise UsageError(
            "the URL is none that is fetched",
            hint="http(s)://host/path in ASCII, without a user, on port 80 or 443",
        )
    scheme, target = found["scheme"].lower(), found["target"] or "/"
    port = int(found["port"] or (443 if scheme == "https" else 80))
    return _Place(scheme, found["host"].lower(), port, target if target.startswith("/") else f"/{target}")


def why_refused(address: str) -> str | None:
    """Why no file is fetched from an IP address: it is of no public host. None where it may be."""
    try:
        ip: IPv4Address | IPv6Address = ip_address(address)
    except ValueError:  # with a zone, as a link-local one has
        return f"{address} is no public address"
    is_public = (
        ip.is_global
        and not (ip.is_multicast or ip.is_private or ip.is_reserved or ip.is_link_local)
        and not any(ip in network for network in _OTHER)
        # ::ffff:0:0/96, 64:ff9b::/96 and their like, which are outside, hold IPv4 addresses.
        and (ip.version == 4 or ip in _ALLOCATED_V6)
    )
    return None if is_public else f"{address} is no public address"


def _resolved(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _fetch(
    place: _Place,
    max_bytes: int,
    within_s: float,
    work: Cancellation | None = None,
    *,
    refusal: Callable[[str], str | None] = why_refused,
    resolve: Resolve = _resolved,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """As read_url, of a host that may be asked. refusal, resolve, tls: for tests, whose server is on this machine."""
    deadline, work = time.monotonic() + within_s, work or Cancellation()
    failed = f"a file of {place.scheme}://{place.host} cannot be fetched"
    try:
        addresses = _before(deadline, resolve, place.host, place.port)
        if not addresses:
            raise _Failed(f"{place.host} has no address")
        for address in addresses:  # all of them: a name with a public and a private one is somebody's trick
            if (why := refusal(address)) is not None:
                raise _Failed(f"{place.host}: {why}")
        if work.is_cancelled:
            raise CancelledError
        with _connected(place, addresses, deadline, tls) as connection, work.interrupting(partial(_end, connection)):
            return _body(place, _Wire(connection, deadline), max_bytes)
    except TimeoutError as e:
        raise UsageError(f"{failed} within {within_s:g} s") from e
    except _TooLong as e:
        raise UsageError(f"the file has more than {max_bytes:,} bytes") from e
    except (_Failed, HTTPException, OSError, ValueError) as e:  # ValueError: a length that is no number
        if work.is_cancelled:
            raise CancelledError from e
        raise UsageError(failed) from e


def _end(connection: socket.socket) -> None:
    """Whoever reads from it, in another thread, has come to its end."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not TLS's own, which would wait for an answer


class _TooLong(Exception):
    pass


def _before(deadline: float, resolve: Resolve, host: str, port: int) -> Sequence[str]:
    """What `resolve` finds; a thread waits for it, as the system's resolver takes no deadline."""
    found = Future[Sequence[str]]()

    def look() -> None:
        try:
            found.set_result(resolve(host, port))
        except BaseException as e:
            found.set_exception(e)

    threading.Thread(target=look, name="kerngen-resolve", daemon=True).start()
    return found.result(deadline - time.monotonic())


class _Wire(io.RawIOBase):
    """A socket as http.client reads and writes it, on which no wait lasts beyond `deadline`, however little comes. Its
    owner closes the socket.
    """

    def __init__(self, socket: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = socket, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(_left_s(self._deadline))
        return self._socket.recv_into(buffer)

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(_left_s(self._deadline))
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def close(self) -> None:
        """http.client closes a connection before it reads an answer that ends with it."""


def _left_s(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _connected(place: _Place, addresses: Sequence[str], deadline: float, tls: ssl.SSLContext | None) -> socket.socket:
    for number, address in enumerate(addresses, 1):
        left = _left_s(deadline)
        try:
            patience = left if number == len(addresses) else min(left, _CONNECT_S)
            connection = socket.create_connection((address, place.port), patience)
            break
        except OSError:
            if number == len(addresses):
                raise
    if place.scheme == "https":
        try:
            connection.settimeout(_left_s(deadline))
            connection = (tls or _tls()).wrap_socket(connection, server_hostname=place.host.strip("[]"))
        except BaseException:
            connection.close()
            raise
    return connection


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _body(place: _Place, wire: _Wire, max_bytes: int) -> bytes:
    client = HTTPConnection(place.host.strip("[]"), place.port)
    client.sock = wire  # so that it connects nowhere itself
    client.putrequest("GET", place.target, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Host": place.host_header, **_HEADERS}.items():
        client.putheader(name, value)
    client.endheaders()
    response = client.getresponse()
    if response.status != 200:
        raise _Failed(f"{place.host} answers {response.status}")
    if (coding := response.getheader("Content-Encoding", "identity").lower()) != "identity":
        raise _Failed(f"{place.host} answers in {coding}, which was not asked for")
    if response.length is not None and response.length > max_bytes:
        raise _TooLong
    pieces, size = [], 0
    while piece := response.read(_CHUNK_BYTES):
        pieces.append(piece)
        if (size := size + len(piece)) > max_bytes:
            raise _TooLong
    if response.length:
        raise _Failed(f"{place.host} ended {response.length:,} bytes early")
    return b"".join(pieces)
