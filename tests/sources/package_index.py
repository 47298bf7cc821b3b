"""A package index on this machine: real pip talks to it, and it counts requests and can lie about hashes."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def make_wheel(package: str, version: str, files: dict[str, bytes]) -> tuple[str, bytes]:
    """(file name, bytes) of a wheel that holds `files` under the package's folder, with nothing else to install."""
    module = package.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{module}/{name}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{module}-{version}-py3-none-any.whl", body.getvalue()


@dataclass
class Index:
    """What the server offers. `hashes` False leaves the hash out; `served` replaces a wheel's bytes after hashing."""

    url: str
    wheels: dict[str, dict[str, bytes]] = field(default_factory=dict)
    served: dict[str, bytes] = field(default_factory=dict)
    hashes: bool = True
    num_requests: int = 0

    def add(self, package: str, version: str, files: dict[str, bytes]) -> str:
        name, body = make_wheel(package, version, files)
        self.wheels.setdefault(package, {})[name] = body
        return name

    def page(self, package: str) -> bytes:
        links = []
        for name, body in self.wheels.get(package, {}).items():
            fragment = f"#sha256={hashlib.sha256(body).hexdigest()}" if self.hashes else ""
            links.append(f'<a href="/files/{package}/{name}{fragment}">{name}</a>')
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """(status, content type, body) of a GET."""
        parts = path.strip("/").split("/")
        if len(parts) == 2 and parts[0] == "simple":
            return (200, "text/html", self.page(parts[1])) if parts[1] in self.wheels else (404, "text/plain", b"")
        if len(parts) == 3 and parts[0] == "files" and parts[2] in self.wheels.get(parts[1], {}):
            return 200, "application/octet-stream", self.served.get(parts[2], self.wheels[parts[1]][parts[2]])
        return 404, "text/plain", b""


@contextmanager
def run_index() -> Iterator[Index]:
    """An index on a free port of the loopback address, gone at the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.num_requests += 1
            status, kind, body = index.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index = Index(f"http://127.0.0.1:{server.server_address[1]}/simple")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
