#!/usr/bin/env python3
"""follow_disk.py CONVERT [RUNS [KILLS [SEED]]]: the disk that minimax-convert --follow --delete-source needs for a source of 1.5 GB.

A checkpoint of M2's form, 19 layers in 15 files, is moved into a directory file by file in a random order; the converter is killed KILLS times in
each of RUNS runs, when it has written random shares of the output or waited for a random time, and goes on with --resume. The bytes that both
directories occupy are added every 5 ms. Their peak
must be at most 1.25 times the larger of source and output, and the output byte for byte that of a plain conversion with the --part-size that
the run's note says. Takes 5 GB of TMPDIR. Exit status 1 unless all hold."""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from resumed import same, split

convert = sys.argv[1]
runs, kills = (int(a) for a in (sys.argv[2:4] + ["5", "12"][len(sys.argv[2:4]) :]))
seed = int(sys.argv[4]) if len(sys.argv) > 4 else int.from_bytes(os.urandom(4), "little")
work = tempfile.mkdtemp(prefix="mm-follow-disk-")
OPTIONS = (["--tp", "2"], ["--tp", "4", "--quant", "nvfp4a16"], ["--quant", "bf16"], ["--tp", "2", "--pp", "2"], ["--tp", "4", "--ep", "2"])
SHAPE = ["--layers", "19", "--experts", "16", "--hidden", "1536", "--inter", "768"]


def occupied(path):
    """Bytes of blocks of all files below, while they come and go."""
    total = 0
    try:
        for e in os.scandir(path):
            total += occupied(e.path) if e.is_dir(follow_symlinks=False) else e.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        pass
    return total


class Watch(threading.Thread):
    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.most, self.stop = path, 0, False

    def run(self):
        while not self.stop:
            self.most = max(self.most, occupied(self.path))
            time.sleep(0.005)


def arrive(stock, to, rng, seconds):
    names = sorted(n for n in os.listdir(stock) if n.endswith(".safetensors"))
    for i in range(len(names)):
        j = min(len(names) - 1, i + rng.choice((0, 0, 1, 3)))
        names[i], names[j] = names[j], names[i]
    for n in (*names, "tokenizer.json"):
        time.sleep(rng.random() * 2 * seconds / len(names))
        os.rename(f"{stock}/{n}", f"{to}/{n}")


def writes(p, seconds, there, size):
    """Whether the process still runs when `there` occupies `size` bytes beside the downloads, or after `seconds`."""
    end = time.monotonic() + seconds
    while p.poll() is None:
        if time.monotonic() > end or occupied(there) - occupied(there + "/download") > size:
            return True
        time.sleep(0.002)
    return False


def attempt(number, source):
    rng, options = random.Random(f"{seed} {number}"), OPTIONS[number % len(OPTIONS)]
    stock, here = f"{work}/stock", f"{work}/here"
    to, out = here + "/download", here + "/out"
    shutil.copytree(source, stock)
    os.makedirs(to)
    for n in ("config.json", "model.safetensors.index.json"):
        os.rename(f"{stock}/{n}", f"{to}/{n}")
    before = occupied(stock)
    watch = Watch(here)
    watch.start()
    threading.Thread(target=arrive, args=(stock, to, rng, rng.choice((0, 2, 20))), daemon=True).start()
    command = [convert, to, "-o", out, *options, "--follow", "--delete-source", "--follow-quiet", "0", "--resume"]
    made = json.loads(subprocess.run([convert, source, *options, "--dry-run", "--json", "-q"], check=True, capture_output=True).stdout)["output_bytes"]
    shares = sorted(0.9 * rng.random() for _ in range(kills))
    killed, said = 0, set()
    while True:
        start = time.monotonic()
        p = subprocess.Popen(command, stderr=subprocess.PIPE)
        if killed < kills and writes(p, 0.2 + 3 * rng.random(), here, shares[killed] * made):
            p.kill()
            killed += 1
        err = p.communicate()[1].decode()
        said |= set(re.findall(r"note: --part-size (\d+)", err))
        if p.returncode == 0 and killed < kills:
            raise AssertionError(f"{options}: finished after {killed} kills, in {time.monotonic() - start:.1f} s")
        if p.returncode == 0:
            break
        assert p.returncode == -9, (options, p.returncode, err)
    watch.stop = True
    watch.join()
    assert len(said) == 1 and not [n for n in os.listdir(to) if n.startswith("model-")], (said, os.listdir(to))
    shutil.rmtree(stock)
    plain = work + "/plain"
    subprocess.run([convert, source, "-o", plain, *options, "--part-size", said.pop(), "--quiet"], check=True)
    after = occupied(plain)
    assert same(out, plain), f"{options}: differs"
    shutil.rmtree(plain)
    shutil.rmtree(here)
    over = watch.most / max(before, after)
    print(f"{' '.join(options)}: source {before / 1e9:.2f} GB, output {after / 1e9:.2f}, at most {watch.most / 1e9:.2f}: {over:.3f} of the larger; {killed} kills", flush=True)
    return over


try:
    subprocess.run([sys.executable, "scripts/bench_checkpoint.py", work + "/made", *SHAPE], check=True, stdout=subprocess.DEVNULL)
    shutil.copy("tests/data/tiny-m2/tokenizer.json", work + "/made")
    split(work + "/made", work + "/source", 15)
    shutil.rmtree(work + "/made")
    most = max(attempt(i, work + "/source") for i in range(runs))
    print(f"follow_disk: at most {most:.3f} of the larger of source and output, limit 1.25; {runs * kills} kills, bytes equal (seed {seed})")
    sys.exit(most > 1.25)
finally:
    shutil.rmtree(work)
