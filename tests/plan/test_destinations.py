"""A consumer's own tables, before anybody is asked to write into them."""

from __future__ import annotations

import re

import pytest
from golden import tables

from kvferry.layout import (
    STATE_TOKENS,
    CacheLayout,
    Channels,
    Context,
    Heads,
    Layer,
    Region,
    key_only,
    separated,
    state,
)
from kvferry.plan import Destinations, Refusal, Unproven

ONE = Heads(0, 1, 1)


def layer(name: str, group: int, base_bytes: int = 0, region: int = 0, block_size: int = 4) -> Layer:
    """Pages of 8 bytes, whatever they hold."""
    fields = key_only(block_size, 8 // block_size)
    return Layer(name, group, region, base_bytes, 8, block_size, "x", ONE, fields)


def of(*layers: Layer) -> Destinations:
    return Destinations(CacheLayout((Region(0, 4096), Region(0, 4096)), layers))


class TestOneGroup:
    destinations = of(layer("a", 0), layer("b", 0, 64))

    def test_blocks_that_are_apart(self) -> None:
        self.destinations.prove(tables([[5, 0, -1, -1, 7]]), 20)
        self.destinations.prove(tables([[]]), 0)

    def test_only_tokens_that_are_wanted_count(self) -> None:
        self.destinations.prove(tables([[5, 0, 5]]), 8)
        with pytest.raises(Refusal, match=r"group 0: destination block 5: consumer has it twice in its table$"):
            self.destinations.prove(tables([[5, 0, 5]]), 9)

    @pytest.mark.parametrize("bad", [8, -2])
    def test_blocks_that_are_not_there(self, bad: int) -> None:
        with pytest.raises(Refusal, match=f"group 0: block id: consumer has id {bad}, num_blocks 8"):
            self.destinations.prove(tables([[0, bad]]), 8)

    def test_a_table_that_is_missing(self) -> None:
        with pytest.raises(Refusal, match="block table of group 0: consumer has 0 tables"):
            self.destinations.prove([], 8)


class TestGroups:
    text = re.escape("destination of layers a (group 0) and b (group 1): consumer has blocks that share bytes")

    def test_pages_that_lie_over_one_another(self) -> None:
        overlaid = of(layer("a", 0), layer("b", 1), layer("c", 0, 64), layer("d", 1, 64))
        overlaid.prove(tables([[1, 2], [3, 0]]), 8)
        overlaid.prove(tables([[1, -1], [-1, 0]]), 8)
        with pytest.raises(Unproven, match=self.text):
            overlaid.prove(tables([[1, 2], [3, 2]]), 8)
        overlaid.prove(tables([[1, 2], [3, 2]]), 4)

    def test_pages_of_other_places_or_regions(self) -> None:
        same = tables([[1, 2], [1, 2]])
        of(layer("a", 0), layer("b", 1, 64)).prove(same, 8)
        of(layer("a", 0), layer("b", 1, region=1)).prove(same, 8)

    def test_only_some_layers_lie_over_another(self) -> None:
        overlaid = of(layer("c", 0), layer("d", 1, 64), layer("a", 0, 128), layer("b", 1, 128))
        with pytest.raises(Unproven, match=self.text):
            overlaid.prove(tables([[1], [1]]), 4)

    def test_pages_of_unequal_sizes(self) -> None:
        """Block 3 of 16 bytes lies where 6 and 7 of 8 bytes do."""
        wide = Layer("b", 1, 0, 0, 4, 4, "x", ONE, key_only(4, 4))
        overlaid = of(layer("a", 0), wide)
        for mine in range(8):
            if mine // 2 == 3:
                with pytest.raises(Unproven, match=self.text):
                    overlaid.prove(tables([[mine], [3]]), 4)
            else:
                overlaid.prove(tables([[mine], [3]]), 4)

    def test_keys_far_from_values(self) -> None:
        """Block 6's keys are where the values of another group's block 2 are."""
        near, far = separated(8, 4, 1, 1, 2), separated(4, 4, 1, 1, 2)
        overlaid = of(Layer("a", 0, 0, 0, 8, 4, "x", ONE, near), Layer("b", 1, 0, 0, 4, 4, "x", ONE, far))
        overlaid.prove(tables([[7], [2]]), 4)
        with pytest.raises(Unproven, match=self.text):
            overlaid.prove(tables([[6], [2]]), 4)

    def test_gaps_between_pages_are_free(self) -> None:
        """Two groups share pages half and half."""
        halves = [Layer(name, g, 0, 8 * g, 8, 4, "x", ONE, key_only(4, 2, 16)) for g, name in enumerate("ab")]
        of(*halves).prove(tables([[3], [3]]), 4)

    def test_states_over_attention(self) -> None:
        fields = state("ssm", Channels(1, 4), 2, 0, 8)
        slots = Layer("b", 1, 0, 0, 8, STATE_TOKENS, "x", ONE, fields)
        overlaid = of(layer("a", 0), slots)
        overlaid.prove(tables([[1, 2], [3]]), 8)
        with pytest.raises(Unproven, match=self.text):
            overlaid.prove(tables([[1, 2], [2]]), 8)

    def test_blocks_count_the_tokens_of_all_ranks(self) -> None:
        dealt = [Layer(name, g, 0, 0, 8, 8, "x", ONE, key_only(4, 2), Context(0, 2, 4)) for g, name in enumerate("ab")]
        of(*dealt).prove(tables([[1, 2], [3, 2]]), 8)
        with pytest.raises(Unproven, match=self.text):
            of(*dealt).prove(tables([[1, 2], [3, 2]]), 9)
