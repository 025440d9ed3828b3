#!/usr/bin/env python3
"""bench_convert.py BIN_DIR [--gb 1] [--runs 3] [--dir DIR]: conversion rates compared with what memory and disk give in the same run.

Ceilings first: memcpy, SHA-256 on one core, direct reading of the source, direct writing with fsync. Then cp (with fsync) and the
conversions alternate, A B A B; every run starts with the source out of the page cache and ends when the output is durable. Medians. What
hashing adds is the difference to the same conversion with a SHA-256 that does nothing (tests/bench/no_hash.c). The last line is the figures."""
import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("bin")
parser.add_argument("--gb", type=float, default=1.0, help="size of the block-FP8 source; the BF16 one is twice that")
parser.add_argument("--runs", type=int, default=3)
parser.add_argument("--dir", help="where to work (default: the temporary directory)")
args = parser.parse_args()
work = tempfile.mkdtemp(prefix="mm-bench-", dir=args.dir)
figures = []
UNHASHED, CONVERT, NO_HASH = ", no hashing", os.path.join(args.bin, "minimax-convert"), os.path.join(args.bin, "../tests/bench/no_hash")
scripts = os.path.dirname(os.path.abspath(__file__))


def files_of(folder):
    return [os.path.join(folder, f) for f in sorted(os.listdir(folder))]


def forget(folder):
    for path in files_of(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(action):
    start = time.monotonic()
    action()
    return time.monotonic() - start


def memcpy_rate():
    n = 1 << 28
    libc = ctypes.CDLL(None)
    a, b = ctypes.create_string_buffer(os.urandom(1 << 20) * 256, n), ctypes.create_string_buffer(n)
    libc.memcpy(b, a, ctypes.c_size_t(n))
    return n / min(timed(lambda: libc.memcpy(b, a, ctypes.c_size_t(n))) for _ in range(5)) / 1e9


def read_direct(folder):
    for path in files_of(folder):
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct"], check=True, stderr=subprocess.DEVNULL)


def write_direct(size):
    path = os.path.join(work, "ceiling")
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=8M", f"count={max(1, size >> 23)}", "oflag=direct", "conv=fsync"], check=True, stderr=subprocess.DEVNULL)
    os.unlink(path)


def copy(source):
    target = os.path.join(work, "copy")
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in files_of(target):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def convert(source, *options, program=CONVERT):
    subprocess.run([program, source, "-o", os.path.join(work, "out"), "-q", *options], check=True)


def run_all(source, actions):
    times = {name: [] for name, _ in actions}
    for _ in range(args.runs):
        for name, action in actions:
            forget(source)
            times[name].append(timed(action))
            shutil.rmtree(os.path.join(work, "out"), ignore_errors=True)
            shutil.rmtree(os.path.join(work, "copy"), ignore_errors=True)
    return {name: statistics.median(t) for name, t in times.items()}


def table(title, source, out_bytes, actions):
    size = sum(os.path.getsize(p) for p in files_of(source))
    seconds = run_all(source, [("direct read", lambda: read_direct(source)), ("direct write", lambda: write_direct(size)), ("cp + fsync", lambda: copy(source)), *actions])
    print(f"{title}: {size / 1e9:.2f} GB in, median of {args.runs}")
    for name, t in seconds.items():
        ratios = [f"{t / seconds['cp + fsync']:.2f} x cp"]
        if name in out_bytes:
            floor = max(seconds["direct read"], seconds["direct write"] * out_bytes[name])
            ratios.append(f"{t / floor:.2f} x max(read, write)")
        if name + UNHASHED in seconds:
            ratios.append(f"hashing {100 * (1 - seconds[name + UNHASHED] / t):.1f} % of the time")
        print(f"  {name:32s} {t:6.2f} s  {size / t / 1e9:5.2f} GB/s of source  {'  '.join(ratios)}")
        if name in out_bytes:
            figures.append(f"{name.removeprefix('--quant ')}: {', '.join(ratios)}")


try:
    experts = max(8, int(args.gb * 64))
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs, memcpy {memcpy_rate():.1f} GB/s on one core")
    subprocess.run([sys.executable, os.path.join(scripts, "bench_checkpoint.py"), os.path.join(work, "fp8"), "--layers", "1", "--experts", str(experts)], check=True, stdout=subprocess.DEVNULL)
    fp8 = os.path.join(work, "fp8")
    table("remap of block FP8", fp8, {"--quant none --tp 8": 1.0, "--quant none --tp 1": 1.0},
          [("--quant none --tp 1", lambda: convert(fp8)), ("--quant none --tp 8", lambda: convert(fp8, "--tp", "8")),
           ("--quant none --tp 8" + UNHASHED, lambda: convert(fp8, "--tp", "8", program=NO_HASH))])
    shutil.rmtree(fp8)
    subprocess.run([sys.executable, os.path.join(scripts, "bench_checkpoint.py"), os.path.join(work, "bf16"), "--layers", "1", "--experts", str(experts), "--bf16"], check=True, stdout=subprocess.DEVNULL)
    bf16 = os.path.join(work, "bf16")
    table("BF16 source", bf16, {"--quant block_fp8 --tp 8": 0.5, "--quant nvfp4a16 absmax": 0.28, "--quant nvfp4a16 mse": 0.28},
          [("--quant block_fp8 --tp 8", lambda: convert(bf16, "--tp", "8", "--quant", "block_fp8")),
           ("--quant block_fp8 --tp 8" + UNHASHED, lambda: convert(bf16, "--tp", "8", "--quant", "block_fp8", program=NO_HASH)),
           ("--quant nvfp4a16 absmax", lambda: convert(bf16, "--tp", "8", "--quant", "nvfp4a16", "--search", "absmax")),
           ("--quant nvfp4a16 mse", lambda: convert(bf16, "--tp", "8", "--quant", "nvfp4a16"))])
    print("; ".join(figures))
finally:
    shutil.rmtree(work)
