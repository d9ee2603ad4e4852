"""TCP sockets of a server."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Listener:
    """Sockets bound to one port of a host.

    Args:
        sockets: The bound sockets, one per network address of the host.
        host: Name or address of the host, as clients use it.

    Examples:
        >>> with eq.serving.bind("127.0.0.1", 0) as listener:
        ...     listener.address.startswith("http://127.0.0.1:")
        True
    """

    sockets: Sequence[socket.socket]
    host: str

    @property
    def port(self) -> int:
        """The bound port, also if any free port was requested."""
        return int(self.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        """URL of the server without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def listen(self) -> None:
        """Accept connections, which wait until a server runs on the sockets."""
        for each in self.sockets:
            each.listen()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.sockets:
            each.close()


def bind(host: str, port: int) -> Listener:
    """Bind sockets to a port on every address of a host name.

    Args:
        host: Name or address of an interface of this machine, for example "127.0.0.1".
        port: Port number; 0 selects any free port.

    Returns:
        The bound sockets, which accept connections once a server runs on them.

    Raises:
        OSError: If the port is in use or not permitted, or the host is not this machine.

    Examples:
        >>> with eq.serving.bind("127.0.0.1", 0) as listener:
        ...     len(listener.sockets), listener.port > 0
        (1, True)
    """
    try:
        addresses = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(f"the host name {host!r} cannot be resolved; use 127.0.0.1") from error
    bound: list[socket.socket] = []
    unavailable: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        try:
            bound.append(_bound(family, kind, protocol, address, bound[:1]))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                unavailable = error  # e.g. an IPv6 address that this machine does not have
                continue
            for each in bound:
                each.close()
            raise OSError(_bind_error(error, host, port)) from error
    if not bound:
        raise OSError(_bind_error(unavailable, host, port)) from unavailable
    return Listener(bound, host)


def _bound(
    family: int, kind: int, protocol: int, address: Any, first: Sequence[socket.socket]
) -> socket.socket:
    """Return a socket bound to `address`, with the port of the first socket if there is one."""
    result = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            # Allows binding a port whose connections have just been closed.
            result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            result.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        port = first[0].getsockname()[1] if first else address[1]
        result.bind((address[0], port, *address[2:]))
    except OSError:
        result.close()
        raise
    return result


def _bind_error(error: OSError | None, host: str, port: int) -> str:
    code = None if error is None else error.errno
    if code == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is already in use; choose another port (--port), or any free "
            "port (--port 0)"
        )
    if code == errno.EACCES:
        return f"port {port} needs administrator rights; choose a port above 1023 (--port)"
    if code == errno.EADDRNOTAVAIL:
        return (
            f"{host} is not an address of this machine; use 127.0.0.1 to accept connections from "
            "this machine only, or 0.0.0.0 for all its interfaces (--host)"
        )
    return f"port {port} of {host} cannot be opened: {error}"
