#!/usr/bin/env python3
"""races.py RACES [--seed S]: two programs and a user at one name, stopped and continued at random calls.

Each race starts two of minimax-convert (also --force), minimax-archive pack, unpack and sign on one name, each stopped before or after a
random rename, unlink or fsync (tests/fault/preload/lacks.c; one in four on a file system without rename flags), while a user puts files and
directories into the target, the staging directories and beside them. Then: every file of the user's is there with its bytes, the name holds
one whole checkpoint or archive (or what the user put there), no program ended with another status than is documented, and running one of them
again, once what it names is moved away, ends with a checkpoint that verifies."""
import argparse
import glob
import multiprocessing.pool
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

BUILD = os.environ.get("BUILD", "build")
os.environ["PATH"] = os.path.abspath(BUILD) + "/bin:" + os.environ["PATH"]
sys.path.insert(0, "tests/cli")
import convert_files as cf

parser = argparse.ArgumentParser()
parser.add_argument("races", type=int, nargs="?", default=24)
parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
args = parser.parse_args()
LACKS = os.path.abspath(os.path.join(BUILD, "tests/fault/preload/lacks.so"))
ALLOWED = {0, 2, 5, 6, 7}  # done; not ours; the target changed; read while it was replaced; locked
work = tempfile.mkdtemp(prefix="mm-races-")
count = {"published": 0, "kept": 0, "put": 0, "stopped": 0}


def programs(root, rng):
    """Two commands that meet at root/out, and whether a checkpoint is there before."""
    convert = ["minimax-convert", f"{work}/src", "-o", f"{root}/out", "-q", "-j", "1"]
    bf16 = [*convert, "--quant", "bf16"]
    pack = ["minimax-archive", "pack", f"{work}/made", "-o", f"{root}/out", "-q", "-j", "1"]
    unpack = ["minimax-archive", "unpack", f"{work}/packed", "-o", f"{root}/out", "-q", "-j", "1"]
    sign = ["minimax-archive", "sign", f"{root}/out", "--key", f"{work}/key.pem", "-q", "-j", "1"]
    force = [*rng.choice((convert, bf16)), "--force"]
    return rng.choice([(convert, bf16, False), (pack, pack, False), (unpack, unpack, False), (pack, unpack, False), (convert, pack, False),
                       (bf16, unpack, False), (sign, sign, True), (sign, force, True), (force, force, True), (force, pack, True)])


def stop_at(rng):
    if rng.random() < 0.2:
        return {}
    call, most = rng.choice((("rename", 3), ("unlink", 9), ("fsync", 12)))
    return {rng.choice(("PAUSE", "PAUSE_AFTER")): f"{call}:{rng.randint(1, most)}"}


def put(root, rng, number):
    """A file of the user's in a random directory that has to do with the name. Its path matters no more; its bytes do."""
    text = f"the user's {number}"
    folders = [d for d in glob.glob(root + "/*") + glob.glob(root + "/.*") if os.path.isdir(d)]
    at = rng.choice([root, *folders])
    name = rng.choice(("note", "config.json", "manifest.json", "model.sig", "deep/er", "model-rank-00000-part-00000.safetensors")) + rng.choice(("", f".{number}"))
    hidden = os.path.basename(at).startswith(".")
    if hidden:  # a name that a run of ours would itself write there stays a guess
        name = f"note.{number}"
    if at == root:
        name = "beside-" + name
    try:
        os.makedirs(os.path.dirname(f"{at}/{name}"), exist_ok=True)
        with open(f"{at}/{name}", "x", encoding="utf-8") as f:
            f.write(text)
        return text
    except (FileExistsError, FileNotFoundError, NotADirectoryError):
        return None


def contents(root):
    found = []
    for top, _, files in os.walk(root):
        for f in files:
            path = os.path.join(top, f)
            if os.path.getsize(path) < 100:
                found.append(open(path, "rb").read().decode(errors="replace"))
    return found


def play(root, rng):
    """Runs both, with the user between; -> [(command, status, stderr)], what the user put."""
    one, two, there = programs(root, rng)
    if there:
        shutil.copytree(f"{work}/made", f"{root}/out")
    elif rng.random() < 0.4:
        os.mkdir(f"{root}/out")
    lacks = {"LACKS": "flags"} if rng.random() < 0.25 else {}
    running, mine = [], []
    for command in (one, two):
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "LD_PRELOAD": LACKS, **lacks, **stop_at(rng)}))
        time.sleep(rng.random() * 0.03)
    for number in range(rng.randint(0, 4)):
        mine.append(put(root, rng, number))
        time.sleep(rng.random() * 0.02)
    rng.shuffle(running)
    deadline = time.monotonic() + 120
    while any(p.poll() is None for p in running):
        assert time.monotonic() < deadline, [p.args for p in running]
        for p in running:
            if p.poll() is None and open(f"/proc/{p.pid}/stat", "rb").read().rsplit(b")", 1)[1].split()[0] == b"T":
                count["stopped"] += 1
                if rng.random() < 0.7:
                    mine.append(put(root, rng, 100 + len(mine)))
                os.kill(p.pid, signal.SIGCONT)
        time.sleep(rng.random() * 0.01)
    return [(p.args, p.returncode, p.stderr.read().decode()) for p in running], [m for m in mine if m]


def verified(path):
    """A packed checkpoint or an archive that is whole."""
    if os.path.exists(path + "/archive.json"):
        done = cf.run("minimax-archive", "list", path)
    else:
        done = cf.run("minimax-verify", "-q", path)
    return done.returncode == 0, done.stderr.decode()


def race(number):
    rng = random.Random(f"{args.seed} {number}")
    root = os.path.join(work, f"race{number}")
    os.mkdir(root)
    ended, mine = play(root, rng)
    found = contents(root)
    lost = [m for m in mine if m not in found]
    story = f"race {number}: {[(' '.join(c[0:2]), '--force' in c, s, e) for c, s, e in ended]}, left {sorted(os.listdir(root))}"
    if lost:
        return f"{story}: lost {lost}"
    if any(s not in ALLOWED for _, s, _ in ended):
        return f"{story}: status"
    made = [c for c, s, _ in ended if s == 0 and "sign" not in c]
    forced = any("--force" in c for c, _, _ in ended)
    if len(made) > 1 and not forced:
        return f"{story}: two published"
    count["put"] += len(mine)
    count["published"] += len(made)
    count["kept"] += len(glob.glob(root + "/out.kept*"))
    if made or any("sign" in c for c, _, _ in ended):
        whole, why = verified(root + "/out")
        if not whole and "E_EXTRA" not in why and not any(f in why for f in ("does not list", "E_SIGNATURE", "model.sig")):
            return f"{story}: {why}"
    for d in glob.glob(root + "/*") + glob.glob(root + "/.*"):  # the user moves away what is the user's
        if os.path.isdir(d):
            for top, _, files in os.walk(d):
                for f in files:
                    if os.path.getsize(os.path.join(top, f)) < 100 and "the user's" in open(os.path.join(top, f), errors="replace").read():
                        os.remove(os.path.join(top, f))
            shutil.rmtree(d + "/deep", ignore_errors=True)
    if os.path.isdir(root + "/out") and not verified(root + "/out")[0]:
        os.rename(root + "/out", root + "/set-aside")
    again = cf.run("minimax-convert", f"{work}/src", "-o", f"{root}/out", "-q", "--restart", "--force")
    if again.returncode != 0 or not verified(root + "/out")[0]:
        return f"{story}: again: {again.returncode} {again.stderr.decode()} {verified(root + '/out')[1]}"
    shutil.rmtree(root)
    return None


try:
    cf.small().save(work + "/src")
    cf.ok("minimax-convert", work + "/src", "-o", work + "/made", "-q")
    cf.ok("minimax-archive", "pack", work + "/made", "-o", work + "/packed", "-q")
    cf.ok("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", work + "/key.pem")
    with multiprocessing.pool.ThreadPool(2) as pool:
        bad = [b for b in pool.imap_unordered(race, range(args.races)) if b]
    for b in bad:
        print(b)
    print(f"{args.races - len(bad)} of {args.races} races: nothing of the user's lost of {count['put']} files, {count['published']} published, "
          f"{count['stopped']} stops, {count['kept']} kept beside (seed {args.seed})")
    sys.exit(bool(bad))
finally:
    shutil.rmtree(work)
