#!/usr/bin/env python3
"""Plans of full-size checkpoints, read from real headers over holes (scripts/sparse_checkpoint.py) and from the released index alone.

Every source tensor is used once, the byte counts are those of the released models, impossible tensor-parallel sizes are refused with
the reason, and a dry run takes less than 64 MiB and writes nothing; its seconds are printed. A row of docs/hardware.md is computed again.
"""
import json
import os
import subprocess
import sys
import time

CONVERT = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")
RELEASED = os.path.join(os.environ.get("SHARED", "../shared"), "released/minimax-m1")
SAN = os.environ.get("SAN") == "1"  # the limits are for the programs as users have them


most = [0.0, 0.0]  # seconds and MiB of any plan


def dry_run(source, *options):
    """(exit status, stdout, stderr) of a dry run that kept the limits."""
    target = os.path.join(os.environ["TMPDIR"], "never")
    start = time.monotonic()
    with open(os.environ["TMPDIR"] + "/out", "w+") as out, open(os.environ["TMPDIR"] + "/err", "w+") as err:
        child = subprocess.Popen([CONVERT, source, "-o", target, "--dry-run", "--json", *options], stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall, seconds, mib = time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
        out.seek(0)
        err.seek(0)
        result = child.returncode, out.read(), err.read()
    print(f"{os.path.basename(source)} {' '.join(options)}: status {result[0]}, {wall:.2f} s, {seconds:.2f} s of CPU, {mib:.0f} MiB")
    most[:] = max(most[0], wall), max(most[1], mib)
    assert SAN or mib < 64, "a dry run must take less than 64 MiB"
    assert not os.path.exists(target), "a dry run must not write"
    return result


def plans(source, tensors, tensor_bytes, quant, *options):
    """The plan at tp 1, 8 and 16 (cuts inside blocks for M2), with a scheme that keeps the source's bytes; 7 is refused."""
    for tp in (1, 8, 16):
        status, out, err = dry_run(source, "--tp", str(tp), "--quant", quant, *options)
        assert status == 0, err
        plan = json.loads(out)
        assert plan["source_tensors"] == tensors and plan["source_bytes"] == tensor_bytes, plan
        assert len(plan["rank_bytes"]) == tp and sum(plan["rank_bytes"]) == plan["output_bytes"], plan
        assert plan["output_bytes"] >= tensor_bytes, plan
        assert tp > 1 or plan["output_bytes"] < 1.0001 * tensor_bytes, "one rank holds each weight once, and headers"
    status, out, err = dry_run(source, "--tp", "7", "--quant", quant, *options)
    assert status == 4 and out == "" and err.count("\n") == 1 and "E_TP" in err and "num_attention_heads" in err, err


def sparse(name, *options):
    path = os.path.join(os.environ["TMPDIR"], name)
    subprocess.run([sys.executable, "scripts/sparse_checkpoint.py", path, *options], check=True)
    return path


plans(sparse("m2", "--m2"), 96103, 230121630720, "block_fp8")
# 23,416 tensors of 854,172,958,720 bytes, and 443,959,214,080 in MXFP8, less the 523 of the vision tower, 1,734,145,024 bytes, which are left out.
plans(sparse("m3", "--m3"), 23416 - 523, 854172958720 - 1734145024, "none")
plans(sparse("m3-mxfp8", "--m3-mxfp8"), 23416 - 523 + 22308, 443959214080 - 1734145024, "none")
released = os.path.exists(RELEASED)
if released:
    config, index = RELEASED + "/config.json", RELEASED + "/model.safetensors.index.json"
    plans(sparse("m1", "--config", config, "--index", index), 8243, 912210767872, "none")
    plans(RELEASED, 8243, 912210767872, "none", "--names-only")
if not SAN:
    subprocess.run([sys.executable, "scripts/hardware.py", os.path.dirname(CONVERT), os.environ["TMPDIR"], "--check", "docs/hardware.md", "1"], check=True)
if released:
    print(f"full-size plans of M1, M2 and M3 hold, bytes exact, at most {most[0]:.2f} s and {most[1]:.0f} MiB")
else:
    print(f"full-size plans of M2 and M3 hold; M1 not run: {RELEASED} is not here")
