"""A proxy between trainers and a vLLM server, which lets a request fail once, as a network does."""

from __future__ import annotations

import http.client
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

#: Routes of a sync in their order; a fault hits one of them.
SYNC = (
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/resume",
)


class FaultyProxy:
    """Forwards requests; ``planted.json`` in ``directory`` has the fault and the stage of the next one.

    directory: of the run; None: all are forwarded.
    place: which of the requests of a sync fails.
    """

    def __init__(self, server: str) -> None:
        self.server = urlsplit(server)
        self.directory: Path | None = None
        self.place = 0
        self.http = _Server(("127.0.0.1", 0), _Handler)
        self.http.proxy = self
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self._lock = threading.Lock()

    def fault(self, path: str) -> str:
        """Return the planted fault if it is for this request, and remove it; or ""."""
        planted = None if self.directory is None else self.directory / "planted.json"
        with self._lock:
            if planted is None or not planted.exists():
                return ""
            name, stage = json.loads(planted.read_text())
            if urlsplit(path).path != (
                SYNC[self.place % len(SYNC)] if stage == "sync" else "/inference/v1/generate"
            ):
                return ""
            planted.rename(planted.with_suffix(".done"))
            return name

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection(str(self.server.hostname), self.server.port)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("Content-Type", "text/plain"), answer.read()
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: FaultyProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        proxy, body = self.server.proxy, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {
            name: text for name, text in self.headers.items() if name.lower() not in ("host", "connection")
        }
        fault = proxy.fault(self.path)
        if fault == "dropped request":  # neither the server nor the client hears of it again
            time.sleep(120)
            return
        answer = (500, "text/plain", b"planted")
        for _ in range({"HTTP 500": 0, "repeated request": 2}.get(fault, 1)):
            try:
                answer = proxy.forward(self.command, self.path, headers, body)
            except OSError as error:
                answer = (502, "text/plain", str(error).encode())
        if fault == "lost connection":  # the server has answered, which the client cannot know
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(answer[0])
        self.send_header("Content-Type", answer[1])
        self.send_header("Content-Length", str(len(answer[2])))
        self.end_headers()
        self.wfile.write(answer[2])

    do_POST = do_GET
