"""A headless browser, where one is installed, that runs a page of measurements beside files of a folder."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
#: CSS pixels of a small phone, and how many a scroll width may differ by rounding.
PHONE, ROUNDING = 390, 1

with_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")


class _Server(http.server.SimpleHTTPRequestHandler):
    """Serve a folder and the harness, and keep what the harness posts and which paths were asked for."""

    harness, results, requested, done = "", None, [], threading.Event()

    def do_GET(self) -> None:
        self.requested.append(self.path)
        if self.path != "/harness":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.harness.encode())

    def do_POST(self) -> None:
        type(self).results = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, *_: object) -> None:
        """Keep requests out of the output of the tests."""


def browse(harness: str, folder: Path, profile: Path, dark: bool = False) -> tuple[Any, list[str], str]:
    """Open ``harness`` in a browser beside the files of ``folder``; it posts its results to ``/results``.

    Returns:
        the results; the paths that the browser requested; the lines of its console.
    """
    values = {"harness": harness, "results": None, "requested": [], "done": threading.Event()}
    handler = type("Server", (_Server,), values)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"]
    quiet += ["--enable-logging=stderr", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    address = f"http://127.0.0.1:{server.server_address[1]}/harness"
    log = profile.with_suffix(".log")
    with log.open("wb") as file:
        browser = subprocess.Popen(
            [BROWSER, "--headless", "--no-sandbox", *quiet, "--window-size=1200,1000", address],
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
        try:
            assert handler.done.wait(150), "the browser did not finish"
        finally:
            browser.terminate()
            browser.wait(20)
            server.shutdown()
            server.server_close()
    console = [line for line in log.read_text(errors="replace").splitlines() if ":CONSOLE" in line]
    return handler.results, handler.requested, "\n".join(console)
