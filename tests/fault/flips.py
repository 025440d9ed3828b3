#!/usr/bin/env python3
"""Every bit of a 64 KiB packed checkpoint, then 1,000 random bits of a larger one (soak: 10,000), flipped one at a time: each is found and
named (flips.c). Then some through minimax-verify itself: exit status 6 (or 4: another version), one line that names the file.

  FLIPS=N for another number of random bits, SEED=N to repeat a run."""
import os
import random
import subprocess
import sys
import tempfile

from packed_files import M2_CONFIG, write_source

BIN, FLIPS = os.environ["BUILD"] + "/bin/", os.environ["BUILD"] + "/tests/fault/flips"
SEED = int(os.environ.get("SEED", random.randrange(1 << 32)))
work = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))


def micro(path):
    config = dict(M2_CONFIG, num_hidden_layers=1, attn_type_list=[1], num_local_experts=2, num_experts_per_tok=1, vocab_size=80,
                  hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, rotary_dim=16)
    write_source(path, config)


def flips(*arguments):
    r = subprocess.run([FLIPS, *arguments], stdout=subprocess.PIPE, text=True)
    print(r.stdout, end="", flush=True)
    if r.returncode:
        sys.exit(f"flips {' '.join(arguments)}: exit status {r.returncode}")
    return r.stdout.splitlines()[-1]


def through_the_program(path, count):
    rng = random.Random(SEED)
    for _ in range(count):
        name = rng.choice(sorted(os.listdir(path)))
        with open(f"{path}/{name}", "r+b") as f:
            at, bit = rng.randrange(os.fstat(f.fileno()).st_size), rng.randrange(8)
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 1 << bit]))
            f.flush()
            r = subprocess.run([BIN + "minimax-verify", path], capture_output=True, text=True)
            f.seek(at)
            f.write(bytes([byte]))
        named = name in r.stderr or 'tensor "' in r.stderr
        if r.returncode not in (4, 6) or r.stdout or r.stderr.count("\n") != 1 or not named:
            sys.exit(f"{name}, byte {at}, bit {bit}: exit status {r.returncode}: {r.stderr}")


micro(work + "/micro")
subprocess.run([BIN + "minimax-convert", work + "/micro", "-o", work + "/small", "--tp", "1", "--quiet"], check=True)
size = sum(os.path.getsize(f"{work}/small/{name}") for name in os.listdir(work + "/small"))
assert 65536 <= size < 90000, size
subprocess.run([BIN + "minimax-convert", "tests/data/tiny-m2", "-o", work + "/large", "--tp", "2", "--quant", "block_fp8", "--quiet"], check=True)
through_the_program(work + "/small", 40)
every = flips(work + "/small", "all")
some = flips(work + "/large", "random", os.environ.get("FLIPS", "1000"), str(SEED))
print(f"{every.split(' (')[0]} of {size} bytes; {some.split(' (')[0]} (seed {SEED})")
