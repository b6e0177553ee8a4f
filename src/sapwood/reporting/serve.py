"""The page of a run while it goes on: a small server on this machine alone, whose page asks for news every second."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sapwood.errors import SapwoodError, explain
from sapwood.reporting.page import finite, page_data, page_html
from sapwood.reporting.sources import Run, read_sources

HERE = "127.0.0.1"
FRESH_S = 0.5


class Server(ThreadingHTTPServer):
    """Serves one page and its data to browsers on this machine."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0, title: str = "") -> None:
        self.paths, self.title = tuple(paths), title
        self._lock, self._known, self._at = threading.Lock(), self._read(), time.monotonic()
        try:
            super().__init__((HERE, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise explain(
                "a free port", f"{port} ({why})", "Leave --port out: a free one is found.", "--port"
            ) from None

    @property
    def url(self) -> str:
        return f"http://{HERE}:{self.server_address[1]}/"

    def hosts(self) -> tuple[str, ...]:
        """The names this server answers to; any other means that a foreign site points here."""
        port = self.server_address[1]
        return f"{HERE}:{port}", f"localhost:{port}"

    def data(self) -> dict[str, Any]:
        """What the page shows now; files are read at most twice a second."""
        with self._lock:
            if time.monotonic() - self._at > FRESH_S:
                self._known, self._at = self._read(), time.monotonic()
            return self._known

    def _read(self) -> dict[str, Any]:
        sources = read_sources(self.paths)
        page: dict[str, Any] = finite(page_data(sources, self.title))
        lasting = {k: v for k, v in page.items() if k != "made"}
        words, running = progress(sources.runs)
        version = hashlib.sha256(json.dumps([lasting, words]).encode()).hexdigest()[:16]
        return {**page, "live": {"running": running, "words": words, "version": version}}


def progress(runs: Sequence[Run]) -> tuple[str, bool]:
    """Where the runs stand, in a few words; and whether any goes on."""
    going = [r for r in runs if r.running]
    if not going:
        stopped = any(r.results is None for r in runs)
        return ("stopped" if stopped else "finished"), False
    run = going[0]
    last: dict[str, Any] = next(
        (e for e in reversed(run.events) if e.get("event") in ("epoch", "trained", "recovered", "measure")), {}
    )
    if last.get("event") == "measure":
        return "measuring", True
    if last.get("event") == "epoch":
        stage = "training" if last.get("stage") == "train" else "recovery"
        return f"seed {last.get('seed')}, {stage}, epoch {last.get('epoch')}", True
    return "going on", True


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "Sapwood", ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.hosts():
            self._answer(403, "text/plain", b"This page is for this machine alone.\n")
            return
        if self.path not in ("/", "/data.json"):
            self._answer(404, "text/plain", b"There is only one page here.\n")
            return
        try:
            data = self.server.data()
        except SapwoodError as error:
            self._answer(503, "text/plain", f"{error}\n".encode())
            return
        if self.path == "/":
            self._answer(200, "text/html", page_html(data).encode())
        else:
            self._answer(200, "application/json", json.dumps(data).encode())

    def handle(self) -> None:
        """A browser that went away in the middle is no error."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests every second are no news."""
