#!/usr/bin/env python3
"""Tokens a second of a checkpoint that is larger than the memory it may use: scripts/bench_larger.py BUILD/bin WORK [--tokens 64] [--gb 3.8]

Makes an M2-shaped block FP8 checkpoint in WORK (kept for the next run) and feeds it token by token on the CPU, from a cold cache, without a limit
and under control groups of a half and a quarter of its bytes (as root; written for versions 1 and 2, run with 1). Beside each: bytes that came from the disk, and what
the disk gives to one reader that goes past the cache."""
import argparse
import json
import os
import random
import subprocess
import sys
import time

ROOT = "/sys/fs/cgroup"


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bin")
    p.add_argument("work")
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--gb", type=float, default=3.8)
    return p.parse_args()


class Group:
    """A control group of a memory limit, for one child."""

    def __init__(self):
        v1 = os.path.isdir(f"{ROOT}/memory")
        self.path = f"{ROOT}/memory/bench-larger" if v1 else f"{ROOT}/bench-larger"
        self.file, self.none = ("memory.limit_in_bytes", "-1") if v1 else ("memory.max", "max")
        os.mkdir(self.path)

    def run(self, limit, command):
        with open(f"{self.path}/{self.file}", "w", encoding="ascii") as f:
            f.write(str(limit) if limit else self.none)
        join = f'echo $$ >"{self.path}/cgroup.procs" && exec "$@"'
        return subprocess.run(["sh", "-c", join, "sh", *command], check=True, capture_output=True, text=True)

    def close(self):
        os.rmdir(self.path)


def forget(path):
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def disk_rate(path):
    """MB/s of 512 MiB read past the cache, 8 MiB at a time."""
    done = subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M", "count=64", "iflag=direct"], capture_output=True, text=True, check=True)
    return float(done.stderr.split(" s,")[0].split()[-1]) ** -1 * 512 * 1.048576


def disk_bytes():
    """Bytes that all disks gave since the machine started."""
    with open("/proc/diskstats", encoding="ascii") as f:
        return sum(int(x.split()[5]) * 512 for x in f if not x.split()[2][-1].isdigit() or x.split()[2].startswith("nvme") and "p" not in x.split()[2])


def main():
    a = arguments()
    packed, ids = f"{a.work}/packed", f"{a.work}/ids.json"
    if not os.path.exists(packed):
        experts = max(8, round(a.gb * 1e9 / 4 / 14.2e6))
        here = os.path.dirname(os.path.abspath(__file__))
        subprocess.run([sys.executable, f"{here}/bench_checkpoint.py", f"{a.work}/source", "--layers", "4", "--experts", str(experts)], check=True)
        subprocess.run([f"{a.bin}/minimax-convert", f"{a.work}/source", "-o", packed, "-q"], check=True)
    rng = random.Random(3)
    with open(ids, "w", encoding="ascii") as f:
        json.dump([rng.randrange(2048) for _ in range(a.tokens + 1)], f)
    part = f"{packed}/model-rank-00000-part-00000.safetensors"
    size = os.path.getsize(part)
    group = Group()
    command = [f"{a.bin}/minimax-eval", packed, "--ids", ids, "--window", str(a.tokens // 2), "--chunk", "1", "-q"]
    try:
        said = None
        for share in (None, 2, 4):
            forget(part)
            rate = disk_rate(part)
            forget(part)
            before, begun = disk_bytes(), time.monotonic()
            done = group.run(size // share if share else None, command)
            took, read = time.monotonic() - begun, disk_bytes() - before
            assert said in (None, done.stdout), "another likelihood under a limit"
            said = done.stdout
            print(f"{size / 1e9:.1f} GB, memory {'as much as there is' if share is None else f'1/{share} of it'}: {a.tokens / took:.1f} tokens/s with the start, "
                  f"{read / 1e9:.1f} GB from the disk at {read / took / 1e6:.0f} MB/s (one direct reader: {rate:.0f})")
    finally:
        group.close()


main()
