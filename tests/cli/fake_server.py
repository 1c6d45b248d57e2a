"""Stands for a vLLM server in the harness's tests: `python fake_server.py PORT WAY`.

WAY: serve (answers /health), fail (ends with a traceback), hang (never listens), deaf (listens, answers nothing well).
"""

from __future__ import annotations

import http.server
import subprocess
import sys
import time


class Healthy(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Unwell(Healthy):
    status = 503


def main(port: int, way: str) -> None:
    print("Application startup complete", flush=True)
    if way == "fail":
        raise ValueError("No available memory for the cache blocks.")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM has its engine
    if way == "hang":
        time.sleep(600)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Unwell if way == "deaf" else Healthy).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
