"""What only the local transport has: ways to reach memory, liveness, permissions, and the options for tests."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transport_harness import (
    SIZES,
    Kit,
    PeerProcess,
    Side,
    batch,
    changed,
    finish,
    give_back,
    moved,
    outcome,
    pattern,
    scattered,
    settle,
)

from kvferry.layout import Region
from kvferry.transport import hostmem
from kvferry.transport.base import BadTransfer, PeerLost, State, TransportError
from kvferry.transport.local import LocalTransport
from kvferry.transport.registry import make

WHOLE = batch([0], [0], [SIZES[0]])
LOCAL = Kit("local", "local")
MEMFD = Kit("local-shm", "local", memory="memfd")


@pytest.fixture
def peer_of() -> Iterator[Callable[[Kit], PeerProcess]]:
    started: list[PeerProcess] = []

    def start(kit: Kit) -> PeerProcess:
        started.append(PeerProcess(kit))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.mark.parametrize("memory", ["memfd", "/dev/shm file"])
def test_shared_memory_is_mapped(peer_of: Any, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"/dev/shm/kvferry-test-{os.getpid()}"
    peer = peer_of(Kit("local", "local", memory="memfd" if memory == "memfd" else path))
    here = Side(LOCAL)
    try:
        connected = here.transport.connect(peer.start((SIZES[0],)))
        peer.call("fill", region=0, seed=3)
        used: list[str] = []
        for name in ("copy", "copy_own"):
            monkeypatch.setattr(hostmem, name, watched(name, used))
        small = scattered(1000, SIZES[0], 4)
        small_expected = moved(here.buffers[0], pattern(3, SIZES[0]), *small[2:])
        finish(here.transport, here.transport.read(connected, [small]))
        assert np.array_equal(here.buffers[0], small_expected)
        finish(here.transport, here.transport.read(connected, [WHOLE]))
    finally:
        Path(path).unlink(missing_ok=True)
    assert np.array_equal(here.buffers[0], pattern(3, SIZES[0]))
    # The peer's own memory is touched only for its token; its region through the mapping here, in either way.
    here_, there = f"copy {os.getpid()}", f"copy {peer.pid}"
    assert used == [there, here_, there, "copy_own"]


def watched(name: str, used: list[str]) -> Any:
    original = getattr(hostmem, name)

    def call(*args: Any, **more: Any) -> None:
        used.append(f"{name} {args[0]}" if name == "copy" else name)
        original(*args, **more)

    return call


def test_shared_memory_that_shrinks_fails_the_transfer(peer_of: Any) -> None:
    path = Path(f"/dev/shm/kvferry-test-{os.getpid()}")
    peer = peer_of(Kit("local", "local", memory=str(path)))
    here = Side(LOCAL)
    try:
        connected = here.transport.connect(peer.start((SIZES[0],)))
        os.truncate(path, 4096)
        handle = here.transport.read(connected, [WHOLE])
        status = here.transport.poll(handle)
    finally:
        path.unlink(missing_ok=True)
    assert status.state is State.FAILED
    assert "shrunk" in status.detail


def test_private_memory_that_is_unmapped_fails_the_transfer(peer_of: Any) -> None:
    peer = peer_of(LOCAL)
    here = Side(LOCAL)
    connected = here.transport.connect(peer.start())
    peer.call("unmap", region=0, offset_bytes=1 << 20)
    status = here.transport.poll(here.transport.read(connected, [WHOLE]))
    assert status.state is State.FAILED
    assert "not mapped" in status.detail
    assert not here.transport.reaches(peer.record)
    with pytest.raises(BadTransfer, match=r"region 0: .*not mapped"):
        here.transport.connect(peer.record)


@pytest.mark.parametrize("kit", [LOCAL, MEMFD], ids=lambda kit: kit.label)
def test_a_closed_transport_is_a_lost_peer(peer_of: Any, kit: Kit) -> None:
    peer = peer_of(kit)
    here = Side(LOCAL)
    connected = here.transport.connect(peer.start())
    peer.call("close")
    with pytest.raises(PeerLost, match="closed"):
        here.transport.read(connected, [WHOLE])
    with pytest.raises(PeerLost, match="closed"):
        here.transport.connect(peer.record)


def test_a_closed_transport_in_this_process_is_a_lost_peer() -> None:
    here, there = Side(LOCAL), Side(LOCAL)
    record = there.transport.record()
    connected = here.transport.connect(record)
    there.transport.close()
    with pytest.raises(PeerLost, match="closed"):
        here.transport.write(connected, [WHOLE])
    with pytest.raises(PeerLost, match="closed"):
        here.transport.connect(record)


def test_a_pid_used_again_is_not_the_peer(peer_of: Any) -> None:
    peer = peer_of(LOCAL)
    record = peer.start()
    started = msgspec.msgpack.decode(record)["process"]["start_time"]
    here = Side(LOCAL)
    with pytest.raises(PeerLost, match="gone"):
        here.transport.connect(changed(record, process={"start_time": started - 1}))
    with pytest.raises(PeerLost, match="closed"):
        here.transport.connect(changed(record, token=bytes(range(16))))


def test_another_host_is_not_reached(peer_of: Any) -> None:
    here = Side(LOCAL)
    record = changed(peer_of(LOCAL).start(), process={"host": "5f0c/pid:[1]"})
    assert not here.transport.reaches(record)
    with pytest.raises(TransportError, match=r"another host: 5f0c/pid:\[1\], this is"):
        here.transport.connect(record)


def test_regions_that_were_not_registered_here_are_refused() -> None:
    here, there = Side(LOCAL), Side(LOCAL)
    record = there.transport.record()
    regions = msgspec.msgpack.decode(record)["regions"]
    regions[0]["length_bytes"] *= 2
    with pytest.raises(BadTransfer, match="not those that it registered"):
        here.transport.connect(changed(record, regions=regions))


def test_another_user_is_told_what_to_allow() -> None:
    """As root, a process of another user tries to reach this one; otherwise this one's user tries process 1."""
    there = Side(LOCAL)
    record = there.transport.record()
    if os.geteuid():
        record = changed(record, process={"pid": 1, "start_time": hostmem.start_time(1)})
    program = (
        "import os, sys\n"
        "from kvferry.transport.registry import make\n"
        "transport = make('local')\n"
        "if not os.geteuid(): os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "record = bytes.fromhex(sys.argv[1])\n"
        "print(transport.reaches(record))\n"
        "transport.connect(record)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, record.hex()], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
    assert "TransportError: region 0: local:" in done.stderr
    assert "ptrace_scope" in done.stderr
    assert "ptracer_any" in done.stderr


def test_memory_that_is_not_there_is_not_registered() -> None:
    with pytest.raises(TransportError, match=r"region 1 at 0x10, 64 bytes: Bad address"):
        LocalTransport().register([Region(np.zeros(64).ctypes.data, 64), Region(16, 64)])


def test_a_sandbox_without_the_system_calls_still_copies_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **more: Any) -> None:
        raise hostmem.CopyError(errno.ENOSYS, 0)

    monkeypatch.setattr(hostmem, "copy", forbidden)
    here, there = Side(LOCAL), Side(LOCAL)
    there.buffers[0][:] = pattern(5, SIZES[0])
    connected = here.transport.connect(there.transport.record())
    finish(here.transport, here.transport.read(connected, [WHOLE]))
    assert np.array_equal(here.buffers[0], pattern(5, SIZES[0]))
    finish(here.transport, here.transport.write(connected, [batch([0], [1], [100])]))
    assert there.buffers[0][1:101].tobytes() == pattern(5, SIZES[0])[:100].tobytes()


class Gate:
    open = False

    def __call__(self) -> bool:
        return self.open


@pytest.mark.parametrize("file", [False, True])
def test_a_gate_holds_transfers_back(file: bool, tmp_path: Path) -> None:
    gate, path = Gate(), tmp_path / "gate"
    path.touch()
    here, there = Side(LOCAL, gate=str(path) if file else gate), Side(LOCAL)
    there.buffers[0][:] = pattern(6, SIZES[0])
    assert not here.transport.traits.synchronous
    connected = here.transport.connect(there.transport.record())
    before = here.snapshot()
    kept, cancelled = (here.transport.read(connected, [WHOLE]) for _ in range(2))
    assert {here.transport.poll(kept).state for _ in range(20)} == {State.PENDING}
    assert here.transport.release(cancelled)
    assert here.snapshot() == before
    gate.open = True
    path.unlink()
    finish(here.transport, kept)
    assert np.array_equal(here.buffers[0], pattern(6, SIZES[0]))


def test_a_peer_that_dies_while_the_gate_is_shut(peer_of: Any) -> None:
    gate = Gate()
    here, peer = Side(LOCAL, gate=gate), peer_of(LOCAL)
    connected = here.transport.connect(peer.start())
    handle = here.transport.read(connected, [WHOLE])
    before = here.snapshot()
    peer.kill()
    assert here.transport.poll(handle).state is State.PENDING
    gate.open = True
    status = settle(here.transport, handle)
    assert status.state is State.FAILED
    assert "gone" in status.detail
    give_back(here.transport, handle)
    assert here.snapshot() == before


def test_back_pressure_counts_what_is_behind_the_gate() -> None:
    gate = Gate()
    here, there = Side(LOCAL, gate=gate, max_inflight=1), Side(LOCAL)
    connected = here.transport.connect(there.transport.record())
    handle = here.transport.read(connected, [WHOLE])
    assert here.transport.poll(handle).state is State.PENDING
    with pytest.raises(TransportError, match="1 transfers in flight"):
        here.transport.read(connected, [WHOLE])
    gate.open = True
    finish(here.transport, handle)
    assert outcome(here.transport, lambda: here.transport.read(connected, [WHOLE])) == "done"


def test_ptracer_any_is_harmless_without_yama() -> None:
    transport = make("local", {"ptracer_any": True})
    transport.close()


def test_a_wire_carries_one_transfer_after_another() -> None:
    memory = np.zeros(64, dtype=np.uint8)
    source = np.arange(64, dtype=np.uint8)
    here, there = LocalTransport(wire_mbps=1e-3), LocalTransport()  # 32 bytes take 32 ms
    try:
        here.register([Region(memory.ctypes.data, memory.nbytes)])
        there.register([Region(source.ctypes.data, source.nbytes)])
        peer = here.connect(there.record())
        handles = [here.read(peer, [batch([offset], [offset], [32])]) for offset in (0, 32)]
        assert not here.traits.synchronous
        assert [handle.status.state for handle in handles] == [State.PENDING] * 2
        assert not memory.any()
        while here.poll(handles[1]).state is State.PENDING:
            pass
        assert here.poll(handles[0]).state is State.DONE  # it was due first
        assert memory.tolist() == source.tolist()
        assert handles[1].due_at - handles[0].due_at == pytest.approx(0.032)
    finally:
        here.close()
        there.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wire_mbps": "fast"}, "local: option wire_mbps: Expected `float | null`, got `str`: 'fast'"),
        ({"max_inflight": "x"}, "local: option max_inflight: Expected `int | null`, got `str`: 'x'"),
        ({"max_inflight": 0}, "local: max_inflight is 0, must be 1 or more"),
        ({"ptracer_any": 1}, "local: option ptracer_any: Expected `bool`, got `int`: 1"),
        ({"gate": 5}, "local: gate is 5, must be a path or a callable"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TransportError) as raised:
        make("local", options)
    assert str(raised.value) == text


@pytest.mark.parametrize("value", [0, -1.0])
def test_a_wire_without_speed_is_refused(value: float) -> None:
    with pytest.raises(TransportError, match="wire_mbps"):
        LocalTransport(wire_mbps=value)
