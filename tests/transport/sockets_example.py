"""The transport of examples/sockets, as a kit: by its import path, as one without a package is configured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from transport_harness import Kit

PATH = str(Path(__file__).parents[2] / "examples" / "sockets")
NAME = "kvferry_sockets:SocketsTransport"


def environment() -> dict[str, str]:
    """Lets this process, and the peers that are given what it returns, import the example."""
    if PATH not in sys.path:
        sys.path.append(PATH)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (PATH, os.environ.get("PYTHONPATH"))))}


KIT = Kit("sockets", NAME, environment=environment)
