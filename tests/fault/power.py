#!/usr/bin/env python3
"""power.py CONVERT SRC STATES [--seed S] [--options "…"]: what a disk could hold after power failed during a conversion, and whether --resume copes.

A conversion is traced with strace and every change below its output's parent is recorded. A random point and a random fate of the changes
that were not synced by then make a state: all of them kept, all lost, one of them lost, one of them kept, or the last write torn in half.
(File data is certain after fsync or fdatasync of that file, a name after fsync of its directory; anything else may be lost or kept.) In every
state nothing incomplete may have the final name, and --resume must end with the reference output, byte for byte, and nothing beside it. With
--follow the source is converted by --follow --delete-source, and the removals of its files are changes, too."""
import argparse
import hashlib
import json
import multiprocessing.pool
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

from resumed import split, wrong

CALLS = "openat,mkdirat,renameat2,unlink,unlinkat,pwrite64,write,ftruncate,fallocate,fsync,fdatasync,fchmod"

parser = argparse.ArgumentParser()
parser.add_argument("convert")
parser.add_argument("source")
parser.add_argument("states", type=int)
parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
parser.add_argument("--options", default="", help="more options of the conversion, in one word")
parser.add_argument("--follow", action="store_true")
args = parser.parse_args()
work = os.path.realpath(tempfile.mkdtemp(prefix="mm-power-"))
if args.follow:
    args.source = split(args.source, work + "/split", 8)


def command(parent, *more):
    follow = ["--follow", "--delete-source", "--follow-quiet", "0", "--follow-timeout", "2"]
    return [args.convert, os.path.join(parent, "source") if args.follow else args.source, "-o", os.path.join(parent, "out"), "--tp", "2", "--quant",
            "block_fp8", "-q", "-j", "1", "--part-size", "600K" if args.follow else "4M", "--journal-every", "256K", *args.options.split(),
            *(follow if args.follow else []), *more]


def unhex(text):
    return bytes(int(x, 16) for x in re.findall(r"\\x([0-9a-f]{2})", text))


def record(parent):
    """-> changes below parent: (kind, path, …); paths are relative to parent, files are told apart by number."""
    log = os.path.join(work, "trace")
    subprocess.run(["strace", "-f", "-y", "-xx", "-s", "100000000", "-e", "trace=" + CALLS, "-e", "signal=none", "-o", log, *command(parent)], check=True)
    changes, number, count = [], {}, 0

    def inside(path):
        full = os.path.normpath(path)
        return os.path.relpath(full, parent) if full.startswith(parent + "/") or full == parent else None

    with open(log, errors="replace") as f:
        for line in f:
            m = re.match(r"\d+ +(\w+)\((.*)\) += (-?\d+)", line)
            if not m or int(m[3]) < 0:
                continue
            call, rest, result = m[1], m[2], int(m[3])
            folders = [unhex(x).decode() if "\\x" in x else x for x in re.findall(r"(?:\d+|AT_FDCWD)<([^>]*)>", rest)]
            texts = [unhex(x) for x in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', rest)]
            path = inside(folders[0]) if folders else None
            if call in ("openat", "mkdirat", "unlink", "unlinkat", "renameat2"):
                names = [inside(os.path.join(folders[i] if i < len(folders) else os.getcwd(), t.decode())) for i, t in enumerate(texts)]
                if call == "openat" and names[0] and "O_CREAT" in rest:
                    number[names[0]] = count
                    changes.append(("create", names[0], count))
                    count += 1
                elif call == "mkdirat" and names[0]:
                    changes.append(("mkdir", names[0]))
                elif call in ("unlink", "unlinkat") and names[0]:
                    changes.append(("unlink", names[0]))
                elif call == "renameat2" and names[0]:
                    changes.append(("rename", names[0], names[1]))
                    number = {p.replace(names[0] + "/", names[1] + "/", 1) if p.startswith(names[0] + "/") else p: n for p, n in number.items()}
            elif path is not None and path in number:
                file = number[path]
                numbers = [int(x) for x in re.findall(r", (\d+)", rest)]
                if call == "pwrite64":
                    changes.append(("write", file, numbers[-1], texts[0][:result]))
                elif call == "ftruncate":
                    changes.append(("size", file, numbers[-1]))
                elif call == "fallocate":
                    changes.append(("size", file, numbers[-2] + numbers[-1]))
                elif call in ("fsync", "fdatasync"):
                    changes.append(("sync", file))
            elif path is not None and call == "fsync":
                changes.append(("syncdir", path))
    return changes


def folder_of(change):
    return os.path.dirname(change[1]) or "."


def unsynced(changes, point):
    """Positions below point whose change is not yet certain."""
    open_ones = []
    for i, c in enumerate(changes[:point]):
        if c[0] == "sync":
            open_ones = [j for j in open_ones if not (changes[j][0] in ("write", "size") and changes[j][1] == c[1])]
        elif c[0] == "syncdir":
            open_ones = [j for j in open_ones if changes[j][0] in ("write", "size") or folder_of(changes[j]) != c[1]]
        else:
            open_ones.append(i)
    return open_ones


def build(changes, point, lost, torn, parent):
    names, data, folders, gone = {}, {}, {"."}, set()
    for i, c in enumerate(changes[:point]):
        if i in lost or c[0] in ("sync", "syncdir"):
            continue
        if c[0] == "create" and folder_of(c) in folders:
            names[c[1]] = c[2]
            data.setdefault(c[2], bytearray())
        elif c[0] == "mkdir":
            folders.add(c[1])
        elif c[0] == "unlink":
            names.pop(c[1], None)
            gone.add(c[1])
            folders.discard(c[1])
        elif c[0] == "rename" and c[1] in folders:
            folders = {c[2] if f == c[1] else f for f in folders}
            names = {p.replace(c[1] + "/", c[2] + "/", 1) if p.startswith(c[1] + "/") else p: n for p, n in names.items()}
        elif c[0] in ("write", "size"):
            bytes_of = data.setdefault(c[1], bytearray())
            if c[0] == "size":
                bytes_of.extend(bytes(max(0, c[2] - len(bytes_of))))
            else:
                piece = c[3][: len(c[3]) // 2] if i == torn else c[3]
                bytes_of.extend(bytes(max(0, c[2] + len(piece) - len(bytes_of))))
                bytes_of[c[2] : c[2] + len(piece)] = piece
    os.mkdir(parent)
    for f in sorted(folders - {"."}):
        os.mkdir(os.path.join(parent, f), 0o700)
    for name, n in names.items():
        if (os.path.dirname(name) or ".") in folders:
            with open(os.path.join(parent, name), "wb") as f:
                f.write(data[n])
    if args.follow:
        shutil.copytree(args.source, parent + "/source", ignore=lambda _, files: [f for f in files if "source/" + f in gone])
        same_inodes(parent)


def same_inodes(parent):
    """Gives the record of sources the inodes and times of the copies that stand for the files of then."""
    path, at = parent + "/.out.partial.sources", 8
    if not os.path.exists(path):
        return
    with open(path, "rb") as f:
        text = bytearray(f.read())
    with open(args.source + "/model.safetensors.index.json", encoding="utf-8") as f:
        names = sorted(set(json.load(f)["weight_map"].values()))
    while at + 12 <= len(text):
        (n,) = struct.unpack_from("<I", text, at)
        what, file = struct.unpack_from("<II", text, at + 4)
        payload = memoryview(text)[at + 4 : at + 4 + n]
        if at + 12 + n > len(text) or hashlib.sha256(payload).digest()[:8] != text[at + 4 + n : at + 12 + n]:
            break
        copy = f"{parent}/source/{names[file]}"
        if what > 1 and os.path.exists(copy):
            s = os.stat(copy)
            struct.pack_into("<QQqq", text, at + 12, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns)
            text[at + 4 + n : at + 12 + n] = hashlib.sha256(payload).digest()[:8]
        payload.release()
        at += 12 + n
    with open(path, "wb") as f:
        f.write(text)


def state(changes, rng):
    point = rng.randrange(1, len(changes) + 1)
    loose = unsynced(changes, point)
    fate = rng.choice(["kept", "lost", "one lost", "one kept", "torn"])
    lost, torn = set(), -1
    if fate == "lost":
        lost = set(loose)
    elif fate == "one lost" and loose:
        lost = {rng.choice(loose)}
    elif fate == "one kept" and loose:
        lost = set(loose) - {rng.choice(loose)}
    elif fate == "torn":
        torn = max((j for j in loose if changes[j][0] == "write"), default=-1)
    return point, fate, lost, torn


def check(changes, number, reference):
    point, fate, lost, torn = state(changes, random.Random(f"{args.seed} {number}"))
    parent = os.path.join(work, f"state{number}")
    build(changes, point, lost, torn, parent)
    out = os.path.join(parent, "out")
    found = wrong(out, reference, command(parent, "--resume"))
    shutil.rmtree(parent)
    if found:
        print(f"after change {point} of {len(changes)} ({fate} {sorted(lost)[:5]}): {found}")
    return not found


try:
    first = os.path.join(work, "first")
    os.mkdir(first)
    if args.follow:
        shutil.copytree(args.source, first + "/source")
    recorded = record(first)
    reference = os.path.join(first, "out")
    with multiprocessing.pool.ThreadPool(os.cpu_count()) as pool:
        good = sum(pool.starmap(check, [(recorded, i, reference) for i in range(args.states)], 1))
    print(f"power failure: {good} of {args.states} states right after --resume ({len(recorded)} changes, seed {args.seed})")
    sys.exit(good != args.states)
finally:
    shutil.rmtree(work)
