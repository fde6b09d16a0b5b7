"""A server of https on this machine, in a thread of the tests' process."""

import hashlib
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CERTIFICATE = Path(__file__).with_name("localhost.pem")


class FileServer:
    """Serves ``files`` by name; ``asked`` lists what was asked for.

    The files cut.bin and chunks.bin end too early, slow.bin comes byte by byte, and so does what is said before
    mute.bin; those of ``redirects`` are somewhere else.
    """

    def __init__(self, port: int) -> None:
        self.root = f"https://127.0.0.1:{port}"
        self.files, self.redirects, self.asked = dict[str, bytes](), dict[str, str](), list[str]()

    def address(self, name: str, content: bytes) -> str:
        """Returns the address of a file that has, or is to have, these bytes; serves them."""
        self.files[name] = content
        return f"{self.root}/{name}#sha256={hashlib.sha256(content).hexdigest()}"


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Yields a server that this process trusts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            served.asked.append(name)
            self.close_connection = True
            if name in served.redirects:
                self.send_response(302)
                self.send_header("Location", served.redirects[name])
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif name not in served.files:
                self.send_error(404)
            else:
                self._send(name, served.files[name])

        def _drip(self) -> None:
            with suppress(OSError):  # of a client that has left
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)

        def _send(self, name: str, body: bytes) -> None:
            if name == "mute.bin":
                self._drip()
            self.send_response(200)
            if name == "chunks.bin":
                self.send_header("Transfer-Encoding", "chunked")
                body = b"1000\r\n" + body
            else:
                self.send_header("Content-Length", str(len(body) + 7 * (name == "cut.bin")))
            self.end_headers()
            if name == "slow.bin":
                self._drip()
            self.wfile.write(body)

        def log_message(self, *of: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = FileServer(server.server_port)
    server.handle_error = lambda *of: None  # type: ignore[method-assign]  # a client that trusts nobody
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
