"""How long planning takes: compile once per pair of workers, bind once per request.

    python benchmarks/plan.py [--layers 80] [--blocks 64]

Times are the best of several repetitions, in milliseconds. "proof" is the part of bind that proves the plan.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

import kvferry.plan.pairs as pairs
from kvferry.layout import CacheLayout, Field, Heads, Layer, Region, cpu_tiles, fused, interleaved, physical_strides
from kvferry.plan import BlockTable, compile
from kvferry.topology import sources

BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, ITEMSIZE, NUM_BLOCKS = 16, 8, 128, 2, 4096


def ordered(order: str, num_layers: int, num_heads: int = NUM_HEADS) -> CacheLayout:
    shape = (NUM_BLOCKS, num_heads, BLOCK_SIZE, 2 * HEAD_SIZE)
    strides, layer_stride = physical_strides(order, shape, num_layers, ITEMSIZE)
    fields = fused(shape, strides, HEAD_SIZE, HEAD_SIZE, ITEMSIZE)
    return cache(fields, num_layers, layer_stride, num_heads)


def planes(num_layers: int) -> CacheLayout:
    fields = interleaved(NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, ITEMSIZE)
    return cache(fields, num_layers, NUM_BLOCKS * fields[0].block_stride_bytes, NUM_HEADS)


def tiles(num_layers: int) -> CacheLayout:
    shape = (NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    strides, layer_stride = physical_strides("LBHNC", shape, num_layers, ITEMSIZE)
    return cache(cpu_tiles(shape, strides, HEAD_SIZE, ITEMSIZE), num_layers, layer_stride, NUM_HEADS)


def cache(fields: tuple[Field, ...], num_layers: int, layer_stride: int, num_heads: int) -> CacheLayout:
    heads = Heads(0, num_heads, NUM_HEADS)
    layers = [
        Layer(f"layers.{i}", 0, 0, i * layer_stride, NUM_BLOCKS, BLOCK_SIZE, "bfloat16", heads, fields)
        for i in range(num_layers)
    ]
    content = 2 * HEAD_SIZE * ITEMSIZE
    length = num_layers * NUM_BLOCKS * num_heads * BLOCK_SIZE * content
    return CacheLayout((Region(0, length),), tuple(layers))


def best_ms(action: Callable[[], object], repeat: int = 7) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def measure(name: str, consumer: CacheLayout, producer: CacheLayout, num_blocks: int) -> None:
    (share,) = sources(consumer, 0, 1, [producer])
    plan = compile(consumer, producer, share)
    rng = np.random.default_rng(0)
    mine, theirs = (BlockTable(rng.permutation(NUM_BLOCKS)[:num_blocks]) for _ in range(2))
    end = num_blocks * BLOCK_SIZE - 5
    transfer = plan.bind([mine], [theirs], 0, end)
    bind_ms = best_ms(lambda: plan.bind([mine], [theirs], 0, end))
    tables: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] = ([mine.block_ids], [theirs.block_ids])
    proof_ms = best_ms(lambda: pairs.prove(plan.claims, plan.region_bytes, tables, (0, end), transfer))
    compile_ms = best_ms(lambda: compile(consumer, producer, share), 2)
    print(f"{name:32} {compile_ms:10.2f} {bind_ms:8.2f} {proof_ms:8.2f} {transfer.num_descriptors:12}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--blocks", type=int, default=64)
    options = parser.parse_args()
    print(f"{options.layers} layers, {options.blocks} blocks of {BLOCK_SIZE} tokens, {NUM_HEADS} KV heads, ms")
    print(f"{'':32} {'compile':>10} {'bind':>8} {'proof':>8} {'descriptors':>12}")
    for left, right in (("LBHNC", "LBHNC"), ("BLHNC", "BLHNC"), ("BHLNC", "BHLNC"), ("LBHNC", "LBNHC")):
        measure(f"{left} <- {right}", ordered(left, options.layers), ordered(right, options.layers), options.blocks)
    measure("interleaved <- interleaved", planes(options.layers), planes(options.layers), options.blocks)
    measure("CPU tiles <- CPU tiles", tiles(options.layers), tiles(options.layers), options.blocks)


if __name__ == "__main__":
    main()
