"""Reads the KV caches of running servers from outside, through /proc, to compare blocks byte by byte."""

from __future__ import annotations

import secrets
import time

import msgspec
from checks import rendezvous

from kvferry import records
from kvferry.cli.servers import Server
from kvferry.control.addresses import AllowedRanges
from kvferry.control.endpoint import Endpoint, Received
from kvferry.control.security import Security
from kvferry.layout import Layer
from kvferry.protocol import messages
from kvferry.records import EngineRecord, WorkerRecord

_PATIENCE_S = 30.0


def record_of(server: Server) -> EngineRecord:
    """A server's record, asked for as a peer would."""
    engine_id, address = rendezvous(server)
    with Endpoint("127.0.0.1", Security.choose("127.0.0.1", ()), AllowedRanges()) as endpoint:
        endpoint.dial(address)
        hello = messages.Hello(
            version=messages.PROTOCOL_VERSION, engine_id=engine_id, incarnation=secrets.token_hex(16), seq=1
        )
        endpoint.send(address, messages.encode(hello))
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            for event in endpoint.receive(1.0):
                assert isinstance(event, Received), event
                answer = messages.decode(event.frame)
                assert isinstance(answer, messages.Record), answer
                return records.decode_engine(answer.payload)
    raise AssertionError(f"{server.name} did not answer on {address}")


def blocks(worker: WorkerRecord, layer: Layer) -> list[bytes]:
    """What each block of a layer holds now; of a page, the bytes of the layer's fields from first to last."""
    (stride,) = {field.block_stride_bytes for field in layer.fields}
    first = min(field.base_bytes for field in layer.fields)
    reach = max(
        field.base_bytes + 1 + sum((axis.size - 1) * axis.stride_bytes for axis in field.axes) for field in layer.fields
    )
    start = worker.layout.regions[layer.region].address + layer.base_bytes + first
    with open(f"/proc/{_pid(worker)}/mem", "rb", buffering=0) as memory:
        return [_read(memory, start + block * stride, reach - first) for block in range(layer.num_blocks)]


def _pid(worker: WorkerRecord) -> int:
    """The worker's process, which its record for the local transport names."""
    (payload,) = (transport.payload for transport in worker.transports if transport.name == "local")
    pid: int = msgspec.msgpack.decode(payload)["process"]["pid"]
    return pid


def _read(memory: object, address: int, length: int) -> bytes:
    memory.seek(address)  # type: ignore[attr-defined]
    return memory.read(length)  # type: ignore[attr-defined, no-any-return]
