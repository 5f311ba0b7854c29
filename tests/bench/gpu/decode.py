"""Decode and prefill of the GPU decoder alone (no scheduler): ms a step, tokens/s, share of the floor.

Qwen3-8B shape, random weights.

Run: python tests/bench/gpu/decode.py [--out FILE] [--quick]. Prints a table and writes JSON. Floor of a step =
max(weight bytes / copy rate, FLOP / matmul rate) + KV bytes / copy rate, both rates measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from kvalet.runtime.cuda_decoder import CudaDecoder, matrix_bytes
from kvalet.runtime.cuda_graphs import DecodeGraph
from kvalet.runtime.cuda_ops import CudaOps
from kvalet.runtime.page_tables import page_tables
from qwen3 import SPEC, cuda_device
from qwen3 import decoder as qwen3_decoder

PAGE = 16
DEVICE = cuda_device()
CELLS = [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (1, 8192), (8, 8192), (32, 8192), (64, 8192)]


def median_ms(run: Any, n: int, warmup: int = 3) -> tuple[float, float]:
    """(median, p99) of ``n`` runs by device events."""
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in pairs)
    return times[n // 2], times[min(n - 1, int(n * 0.99))]


def ceilings() -> tuple[float, float]:
    """(bytes/s of a device copy counting read + written, FLOP/s of a bf16 matmul on random data)."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    copy_ms, _ = median_ms(lambda: target.copy_(source), 10)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    matmul_ms, _ = median_ms(lambda: a @ b, 10)
    return 2 * (4 << 30) / copy_ms * 1e3, 2 * 8192**3 / matmul_ms * 1e3


def decode_cell(decoder: CudaDecoder, rows: int, context: int, rates: tuple[float, float], steps: int = 40) -> dict[str, Any]:
    """``steps`` greedy steps with growing lengths: planned on the host each step, as the engine does, and the graph alone."""
    pool = decoder.pool
    per_row = -(-(context + steps + 8) // PAGE)
    order = (torch.randperm(pool.shape[0] - 1)[: rows * per_row] + 1).tolist()
    tables = [order[i * per_row : (i + 1) * per_row] for i in range(rows)]
    last_ids = torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE)
    plan = decoder.ops.decode_attention(pool, SPEC.n_q_heads, rows, SPEC.windows, alone=False)
    logits = torch.empty(rows, SPEC.vocab, dtype=pool.dtype, device=DEVICE)
    graph = DecodeGraph(decoder, plan, last_ids, PAGE, logits)
    length = [context]

    def step() -> None:
        position = length[0]
        graph.set_rows(tables, [position] * rows, range(1, rows + 1))
        graph.replay()
        length[0] += 1

    stepped, _ = median_ms(step, steps)
    torch.cuda.synchronize()
    length[0] = context
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begin) / steps * 1e3
    alone, p99 = median_ms(graph.replay, steps)
    copy_rate, flops = rates
    weights = matrix_bytes(decoder.weights)
    floor = max(weights / copy_rate, weights * rows / flops) + rows * context * 147_456 / copy_rate
    return {
        "rows": rows, "context": context, "graph_ms": alone, "graph_p99_ms": p99, "step_ms": stepped, "wall_ms": wall,
        "tokens_per_s": rows / wall * 1e3, "floor_ms": floor * 1e3, "of_floor": floor * 1e3 / alone,
    }  # fmt: skip


def prefill_cell(decoder: CudaDecoder, n: int, piece: int) -> dict[str, Any]:
    plan = decoder.ops.prefill_attention(decoder.pool, SPEC.n_q_heads, SPEC.windows)
    pages = (torch.randperm(decoder.pool.shape[0] - 1)[: -(-n // PAGE)] + 1).tolist()
    where = torch.tensor(pages, device=DEVICE)
    ids = torch.randint(1000, 150_000, (n,), device=DEVICE)

    def run() -> None:
        for start in range(0, n, piece):
            end = min(n, start + piece)
            positions = torch.arange(start, end, device=DEVICE)
            torch.cuda.current_stream().synchronize()  # a plan's pinned buffer is read by the stream: never plan over it
            plan.plan(page_tables([pages], [end], PAGE), [end - start])
            dest = where[positions // PAGE] * PAGE + positions % PAGE
            decoder.logits(decoder.hidden(ids[start:end], positions, dest, plan.run)[-1:])

    ms, _ = median_ms(run, 3, warmup=1)
    return {"prefill_tokens": n, "piece": piece, "ms": ms, "tokens_per_s": n / ms * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gpu-decode.json")
    parser.add_argument("--quick", action="store_true", help="two decode cells only")
    parser.add_argument("--prefill-only", action="store_true")
    options = parser.parse_args()
    rates = ceilings()
    pool = torch.empty(34_000, 36, 2, PAGE, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    for page in pool.split(1000):
        page.normal_(0, 0.5)
    decoder = qwen3_decoder(pool, CudaOps(DEVICE))
    rows = []
    for cell in [] if options.prefill_only else CELLS[2:4] if options.quick else CELLS:
        rows.append(decode_cell(decoder, *cell, rates))
        r = rows[-1]
        print(
            f"decode {r['rows']:4d} x {r['context']:5d}: graph {r['graph_ms']:.2f} ms (p99 {r['graph_p99_ms']:.2f}), "
            f"wall {r['wall_ms']:.2f} ms, {r['tokens_per_s']:.0f} tok/s, {r['of_floor'] * 100:.0f} % of floor",
            flush=True,
        )
    prefills = [prefill_cell(decoder, n, piece) for n, piece in ((4096, 8192), (16384, 8192), (32768, 8192))]
    for p in prefills:
        print(f"prefill {p['prefill_tokens']}: {p['tokens_per_s']:.0f} tok/s", flush=True)
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_s": rates[0],
        "matmul_flop_per_s": rates[1], "decode": rows, "prefill": prefills,
    }  # fmt: skip
    Path(options.out).write_text(json.dumps(result, indent=1))
    print(f"copy {rates[0] / 1e12:.2f} TB/s, matmul {rates[1] / 1e12:.0f} TFLOP/s; written {options.out}")


if __name__ == "__main__":
    main()
