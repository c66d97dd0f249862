"""Who may ask a server that asks for no key: pages of its own origin and of those that it is told, by its own names.

A browser lets any page send a request to any server, and only keeps the answer from it. A page whose name is made to
resolve to this machine (DNS rebinding) reads that, too. What is no browser sends no Origin, and names the host it
means.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from kerngen.errors import UsageError
from kerngen.runtime.serve.errors import ApiError, shortened

ANY = "*"
_PORTS = {"http": 80, "https": 443}
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s?#@*]+")  # programs on a desk have schemes of their own


@dataclass(frozen=True, slots=True)
class Allowed:
    """origins: as `https://chat.example:8443`, hosts: names without a port, of requests that are taken besides those of
    the server's own; ANY stands for all.
    """

    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def require(self, host: bytes, origin: bytes | None) -> None:
        """Raises ApiError for a request with these headers that another page sends, or for another host's name."""
        name, port = _host(host.decode("latin-1"))
        if not (ANY in self.hosts or _is_address(name) or name in self.hosts):
            raise ApiError(403, f"the host {shortened(name)!r} is not served here; --allow-host says which names are",
                           code="host_not_allowed")  # fmt: skip
        if origin is None or ANY in self.origins or (given := origin.decode("latin-1").lower()) in self.origins:
            return
        scheme, _, rest = given.partition("://")
        theirs, their_port = _host(rest)
        default = _PORTS.get(scheme)
        # A proxy that speaks TLS may stand between the page and this server.
        if default is None or (theirs, their_port or default) != (name, port or default):
            raise ApiError(403, f"a page of {shortened(given)!r} may not ask here; --allow-origin says which may",
                           code="origin_not_allowed")  # fmt: skip


def allowed(origins: Sequence[str], hosts: Sequence[str], bound: str) -> Allowed:
    """As an owner gave them, and with this machine's own names. bound: the host that the server listens on.

    Raises UsageError for what is no origin, or no name of a host.
    """
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--allow-origin {origin}: no origin",
                             hint="scheme, host and port, as in https://chat.example:8443; or *")  # fmt: skip
    for host in hosts:
        if not host or set(host) & set(":/@ ") or (ANY in host and host != ANY):
            raise UsageError(f"--allow-host {host}: no name of a host", hint="as in gpu1.example, without a port; or *")
    own = ("localhost", socket.gethostname(), bound)
    return Allowed(tuple(origin.lower() for origin in origins), tuple(name.lower() for name in (*own, *hosts)))


def _host(header: str) -> tuple[str, int | None]:
    """Name and port of a Host header, or of what is behind an origin's scheme."""
    name, _, port = header.strip().lower().rpartition(":")
    if not port.isdecimal() or len(port) > 5 or (name.startswith("[") and not name.endswith("]")):
        return header.strip().lower(), None
    return name, int(port)


def _is_address(name: str) -> bool:
    """Which nobody can make resolve to another one."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
