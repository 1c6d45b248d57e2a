"""A real HTTP server in place of vLLM's or a router's."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from typing import Any


class Recorder:
    """A real HTTP server on loopback that answers as it is told and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.answers: dict[str, Callable[[Any], tuple[int, str]]] = {}
        recorder = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: Any) -> None:
                recorder.requests.append((self.path, dict(self.headers), body))
                status, text = recorder.answers.get(self.path, lambda _: (404, "no such path"))(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
