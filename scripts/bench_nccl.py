#!/usr/bin/env python3
"""How long NCCL's all-reduce takes alone in a graph, for comparison with `gpu bench peers`: one process a GPU, through PyTorch.

  bench_nccl.py [RANKS]    sums of bf16 [rows, 3072] and [rows, 6144] over RANKS (2) GPUs; medians of 11 graphs of 200
"""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COUNT, ROUNDS = 200, 11


def time_sum(rank, rows, width):
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COUNT):
            dist.all_reduce(x)
    took = []
    for _ in range(ROUNDS):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        took.append((time.monotonic() - start) / COUNT * 1e6)
    if rank == 0:
        print(f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}: sum of bf16 [{rows}, {width}] over {dist.get_world_size()} ranks: "
              f"{statistics.median(took):.2f} us", flush=True)


def run(rank, ranks):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    for width in (3072, 6144):
        for rows in (1, 2, 4, 8, 16, 64, 256, 2048):
            time_sum(rank, rows, width)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    mp.spawn(run, args=(ranks,), nprocs=ranks)
