"""TCP sockets that a server listens at."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Listener:
    """Sockets that are bound to one port of a host, and the address that clients use.

    Examples:
        >>> with eq.serving.bind("127.0.0.1", 0) as listener:
        ...     listener.address.startswith("http://127.0.0.1:")
        True
    """

    sockets: Sequence[socket.socket]
    host: str

    @property
    def port(self) -> int:
        """The port that is bound, also where any free port was requested."""
        return int(self.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        """Address of the server, with its port and without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def listen(self) -> None:
        """Accept connections; they wait until a server runs on the sockets."""
        for one in self.sockets:
            one.listen()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.sockets:
            one.close()


def bind(host: str, port: int) -> Listener:
    """Bind sockets to a port at every address that a host name stands for.

    Args:
        host: Name or address of an interface of this machine, for instance "127.0.0.1".
        port: Port number; 0 takes any free port.

    Returns:
        The bound sockets. They do not accept connections before a server runs on them.

    Raises:
        OSError: If the port is in use or not permitted, or the host is not one of this machine.

    Examples:
        >>> with eq.serving.bind("127.0.0.1", 0) as listener:
        ...     len(listener.sockets), listener.port > 0
        (1, True)
    """
    try:
        places = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(f"the host name {host!r} cannot be resolved: use 127.0.0.1") from error
    bound: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, place in dict.fromkeys(places):
        try:
            bound.append(_bound(family, kind, protocol, place, bound[:1]))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                missing = error  # A name may have an IPv6 address that this machine lacks.
                continue
            for one in bound:
                one.close()
            raise OSError(_why_not_bound(error, host, port)) from error
    if not bound:
        raise OSError(_why_not_bound(missing, host, port)) from missing
    return Listener(bound, host)


def _bound(
    family: int, kind: int, protocol: int, place: Any, first: Sequence[socket.socket]
) -> socket.socket:
    """A socket that is bound to `place`, with the port of the first socket if there is one."""
    made = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            # A port whose connections have just been closed can be bound again at once.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        port = first[0].getsockname()[1] if first else place[1]
        made.bind((place[0], port, *place[2:]))
    except OSError:
        made.close()
        raise
    return made


def _why_not_bound(error: OSError | None, host: str, port: int) -> str:
    code = None if error is None else error.errno
    if code == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is already in use: choose another port (--port), or 0 for any "
            "free port (--port 0)"
        )
    if code == errno.EACCES:
        return f"port {port} needs administrator rights: choose a port above 1023 (--port)"
    if code == errno.EADDRNOTAVAIL:
        return (
            f"{host} is not an address of this machine: use 127.0.0.1 for this machine only, or "
            "0.0.0.0 for all its interfaces (--host)"
        )
    return f"port {port} of {host} cannot be opened: {error}"
