#!/usr/bin/env python3
"""How fast cuBLASLt multiplies codes under block scales, through PyTorch, for comparison with `gpu bench products`: the large products of a prefill.

  bench_scaled_mm.py [ROWS]    E4M3 [ROWS (8192), k] under a scale for 128 columns of a row, by E4M3 [n, k] under a scale for 128 x 128, to
                               bf16. Hot: graphs of 4, 400 of them, medians. The result is held to the numbers that the codes stand for.
"""
import statistics
import sys

import torch

SHAPES = [(8192, 3072), (3072, 6144), (24576, 6144), (6144, 8192)]  # n, k
COUNT, ROUNDS = 4, 400


def make(rows, k, tall):
    """Codes [rows, k] as `gpu bench` has them, since power decides: of even numbers for inputs, any that is finite for weights. Their scales,
    one for `tall` rows and 128 columns, and the numbers of the first 256 rows."""
    if tall == 1:
        codes = (torch.rand(rows, k, device="cuda") * 896 - 448).to(torch.float8_e4m3fn)
    else:
        byte = torch.randint(0, 256, (rows, k), dtype=torch.uint8, device="cuda")
        codes = torch.where(byte % 128 == 127, byte ^ 1, byte).view(torch.float8_e4m3fn)
    scales = torch.rand(rows // tall, k // 128, device="cuda") + 0.5
    wide = scales[: max(1, 256 // tall)].repeat_interleave(tall, 0).repeat_interleave(128, 1)
    return codes, scales, codes[:256].float() * wide


def time_product(rows, n, k):
    x, x_scales, x_first = make(rows, k, 1)
    w, w_scales, w_first = make(n, k, 128)
    x_scales = x_scales.t().contiguous().t()  # column by column
    lines = -(-w_scales.shape[1] // 4) * 4  # cuBLASLt reads them in fours
    w_scales = torch.nn.functional.pad(w_scales, (0, lines - w_scales.shape[1])).t()

    def product():
        return torch._scaled_mm(x, w.t(), scale_a=x_scales, scale_b=w_scales, out_dtype=torch.bfloat16)

    y = product()[:256, :256].float()
    want = x_first @ w_first.t()
    off = ((y - want).norm() / want.norm()).item()
    if off > 1e-2:
        sys.exit(f"bench_scaled_mm.py: the product of {n} x {k} is off by {off:.1e}")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COUNT):
            product()
    took = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) * 1e3 / COUNT)
    us = statistics.median(took)
    print(f"cuBLASLt, block scales: T={rows} {n} x {k}: {us:.2f} us, {2 * rows * n * k / us * 1e-6:.1f} TFLOP/s", flush=True)


def main():
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    for n, k in SHAPES:
        time_product(rows, n, k)


if __name__ == "__main__":
    main()
