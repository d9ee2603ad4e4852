"""Web server on the loopback address with configurable faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """Server of `files` by path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        """Number of bytes after which each of the next responses ends."""
        self.errors: list[int] = []
        """Status of the next responses."""
        self.knows_ranges = True
        self.sends_length = True
        self.is_chunked = False
        self.shifts_ranges = False
        self.encoding: str | None = None
        """Value of the header Content-Encoding."""
        self.requests: list[tuple[str, str | None]] = []
        """Path and range of every request."""

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        byte_range = self.headers.get("Range")
        self.server.requests.append((self.path, byte_range))
        if self.server.errors:
            self.send_error(self.server.errors.pop(0))
            return
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if byte_range and self.server.knows_ranges:
            start = int(byte_range.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start += int(self.server.shifts_ranges)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        body = content[start:]
        if self.server.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif self.server.sends_length:
            self.send_header("Content-Length", str(len(body)))
        if self.server.encoding:
            self.send_header("Content-Encoding", self.server.encoding)
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts else None
        if self.server.is_chunked:
            self.send_chunks(body if cut is None else body[:cut], is_whole=cut is None)
        else:
            self.wfile.write(body[:cut])

    def send_chunks(self, body: bytes, is_whole: bool) -> None:
        for start in range(0, len(body), 10_000):
            chunk = body[start : start + 10_000]
            # The header of an interrupted chunk states its full length.
            length = len(chunk) if is_whole or len(chunk) == 10_000 else 10_000
            self.wfile.write(b"%x\r\n" % length + chunk)
            if length == len(chunk):
                self.wfile.write(b"\r\n")
        if is_whole:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@contextmanager
def running_server() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
