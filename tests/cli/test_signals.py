from __future__ import annotations

import signal

import pytest

from kvferry.cli.signals import STOPPING, signals_ignored, stop_on_signals


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_the_first_signal_ends_the_block_and_later_ones_do_not_disturb_its_clean_up(
    number: int, error: type[BaseException]
) -> None:
    before = [signal.getsignal(each) for each in STOPPING]
    cleaned = []

    def interrupted() -> None:
        try:
            signal.raise_signal(number)
        finally:
            for each in STOPPING:
                signal.raise_signal(each)
                cleaned.append(each)

    with pytest.raises(error) as raised, stop_on_signals():
        interrupted()
    assert cleaned == list(STOPPING)
    if error is SystemExit:
        assert raised.value.code == 128 + number
    assert [signal.getsignal(each) for each in STOPPING] == before


def test_no_signal_interrupts_a_protected_block() -> None:
    with stop_on_signals():
        before = [signal.getsignal(each) for each in STOPPING]
        with signals_ignored():
            for each in STOPPING:
                signal.raise_signal(each)
        assert [signal.getsignal(each) for each in STOPPING] == before
