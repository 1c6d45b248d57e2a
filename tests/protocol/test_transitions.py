from enum import Enum

import pytest

from kvferry.protocol.consumer import USES
from kvferry.protocol.hold import CLAIMS, HOLDS
from kvferry.protocol.load import LOADS
from kvferry.protocol.transitions import IllegalTransition, Table

TABLES = [HOLDS, CLAIMS, USES, LOADS]


class Light(Enum):
    RED = "red"
    GREEN = "green"


class Signal(Enum):
    GO = "go"
    STOP = "stop"


def test_what_is_not_in_the_table_is_illegal():
    table = Table("light", Light.RED, {(Light.RED, Signal.GO): Light.GREEN})
    assert table.next(Light.RED, Signal.GO) is Light.GREEN
    assert table.allows(Light.RED, Signal.GO)
    assert not table.allows(Light.GREEN, Signal.GO)
    with pytest.raises(IllegalTransition, match="light: 'stop' while 'red'"):
        table.next(Light.RED, Signal.STOP)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.thing)
def test_every_state_is_reached_and_every_thing_can_end(table):
    states, reached, ends = set(type(table.start)), {table.start}, set()
    for _ in states:
        reached |= {after for (before, _), after in table.moves.items() if before in reached}
    assert reached == states
    ends = states - {before for before, _ in table.moves}
    assert ends
    for _ in states:
        ends |= {before for (before, _), after in table.moves.items() if after in ends}
    assert ends == states


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.thing)
def test_every_trigger_does_something(table):
    triggers = {trigger for _, trigger in table.moves}
    assert triggers == set(type(next(iter(triggers))))
