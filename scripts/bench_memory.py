#!/usr/bin/env python3
"""bench_memory.py CONVERT [--gb 4] [--dir DIR] [-j N]: peak memory of conversions of an M2-shaped checkpoint of GB gigabytes.

Each runs in a memory cgroup of 1 GiB, page cache counted (version 1 or 2, whichever this process may make one in), or where there is none under
RLIMIT_DATA of 1 GiB, which counts private memory only; the line says which. Asserted: the conversion succeeds, and its peak RSS is at most
256 MiB + 64 MiB x threads, the default --mem-limit."""
import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile

LIMIT = 1 << 30
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("convert")
parser.add_argument("--gb", type=float, default=4)
parser.add_argument("--dir", default=os.environ.get("TMPDIR"))
parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
args = parser.parse_args()
work = tempfile.mkdtemp(prefix="mm-memory-", dir=args.dir)


class Cgroup:
    """A memory cgroup of LIMIT bytes; path is None where none may be made."""

    def __init__(self):
        self.path = None
        for root, limit, self.most in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"), ("/sys/fs/cgroup", "memory.max", "memory.peak")):
            path = f"{root}/minimax-{os.getpid()}"
            try:
                os.mkdir(path)
            except OSError:
                continue
            try:
                with open(f"{path}/{limit}", "w", encoding="ascii") as f:
                    f.write(str(LIMIT))
                self.path = path
                return
            except OSError:
                os.rmdir(path)

    def enter(self):
        if not self.path:
            resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
            return
        with open(f"{self.path}/cgroup.procs", "w", encoding="ascii") as f:
            f.write(str(os.getpid()))

    def says(self):
        if not self.path:
            return "RLIMIT_DATA of 1 GiB (no cgroup may be made here)"
        try:
            with open(f"{self.path}/{self.most}", encoding="ascii") as f:
                return f"cgroup of 1 GiB, of which {int(f.read()) >> 20} MiB were used, page cache included"
        except OSError:
            return "cgroup of 1 GiB, page cache included"

    def close(self):
        if self.path:
            os.rmdir(self.path)


def measure(source, options):
    group = Cgroup()
    try:
        child = subprocess.Popen([args.convert, source, "-o", work + "/out", "-q", "-j", str(args.jobs), *options], preexec_fn=group.enter)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        mib, most = usage.ru_maxrss / 1024, 256 + 64 * args.jobs
        print(f"{' '.join(options)}: status {child.returncode}, peak RSS {mib:.0f} MiB of {most} MiB, {args.jobs} threads, {group.says()}", flush=True)
        assert child.returncode == 0 and mib <= most
    finally:
        group.close()
    shutil.rmtree(work + "/out")
    return mib


def source(name, *options):
    subprocess.run([sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "bench_checkpoint.py"), f"{work}/{name}", "--layers", "1", *options], check=True,
                   stdout=subprocess.DEVNULL)
    return f"{work}/{name}"


try:
    experts, peaks = str(max(8, int(args.gb * 64 * 1.5) // 8 * 8)), []
    fp8 = source("fp8", "--experts", experts)
    peaks += [measure(fp8, o) for o in (["--quant", "none", "--tp", "8"], ["--quant", "none"], ["--quant", "nvfp4a16", "--tp", "8"], ["--quant", "none", "--tp", "8", "--compress", "zstd"])]
    shutil.rmtree(fp8)
    bf16 = source("bf16", "--experts", str(int(experts) // 2), "--bf16")
    peaks += [measure(bf16, o) for o in (["--quant", "block_fp8", "--tp", "8"], ["--quant", "mxfp4", "--layout", "hf"])]
    print(f"memory: {len(peaks)} conversions of {args.gb:g} GB, highest peak RSS {max(peaks):.0f} MiB, limit {256 + 64 * args.jobs} MiB")
finally:
    shutil.rmtree(work)
