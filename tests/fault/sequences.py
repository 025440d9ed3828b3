#!/usr/bin/env python3
"""sequences.py [SEQUENCES] [SEED]: chains of conversions, each interrupted and resumed, beside the conversion that is made at once.

A sequence takes a source of random extents, a recipe, and then some of: cutting for other ranks, writing with Hugging Face names, converting
those again, packing into an archive and unpacking, quantising a second time. Runs are ended by a signal at a random moment and resumed with other
threads, memory and shares; with an option that is of the plan they are tried too. What is asked:

  a cut for other ranks, an archive, --layout hf       byte for byte what the source itself gives under these options, or its refusal
  what was converted from --layout hf                  every weight bit for bit that of the packed checkpoint of the same recipe
  a second quantisation                                the same of every cut of what it was made from
  --head SCHEME                                        what the rule of that tensor gives
  a resumed run with another option of the plan        refused, and nothing changed
  logits                                               the same of every cut, as near as sums in another order are
  every result                                         passes minimax-verify, and with --source against what it was made from

The reader of results is tests/interop's, from the format page alone. SEQUENCES is 12, SEED 8; ONLY=N does one of them and leaves it; exit status 1 when anything else was seen."""
import collections
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

sys.path[:0] = ["tests/interop", "tests/fault"]
import numpy as np
import packed_files
from packed import Packed
from resumed import files
from unsharded import E2M1, numbers

BIN = os.path.join(os.environ.get("BUILD", "build"), os.environ.get("SEQUENCES_BIN", "bin"))
COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 12
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 8
ONLY = os.environ.get("ONLY")
work = tempfile.mkdtemp(prefix="mm-sequences-", dir=os.environ.get("TMPDIR"))
figures, guard = collections.Counter(), threading.Lock()

SCHEMES = ["none", "bf16", "block_fp8", "tensor_wise_fp8", "channel_fp8", "mxfp8", "int8", "nvfp4", "nvfp4a16", "mxfp4", "w4a16", "w4afp8", "w4a8"]
PATTERNS = ["*qkv_proj*", "*experts*", "*w2*", "*o*_proj*", "lm_head*", "lm_head*", "model.embed_tokens*", "*layers.0*"]


def count(what, n=1):
    with guard:
        figures[what] += n


class Wrong(Exception):
    pass


def dequantised(path):
    """Source name -> its numbers in f32, put together from all ranks."""
    p, found = Packed(path), {}
    for t in p.manifest["tensors"]:
        planes = [dict(p.whole(t, x)) for x in t["planes"]]
        if t["planes"][0]["cell"] == [1, 2]:  # two weights in a byte, the even column low
            for name, codes in planes[0].items():
                odd = np.arange(codes.shape[-1]) % 2
                planes[0][name] = codes >> 4 * odd & 15
        for name, codes in planes[0].items():
            dtype, scheme = t["planes"][0]["dtype"], t["scheme"]
            if scheme in ("w4a8", "w4afp8"):
                value = ((codes ^ 8).astype(np.int8) - 8).astype(np.float32)
            elif scheme == "w4a16":
                value = codes.astype(np.float32) - 8
            elif t["planes"][0]["cell"] == [1, 2]:
                value = E2M1[codes]
            elif dtype == "I8":
                value = codes.view(np.int8).astype(np.float32)
            else:
                value = numbers(codes, dtype).astype(np.float32)
            for x, plane in zip(t["planes"][1:], planes[1:]):
                value = value * numbers(plane[name], x["dtype"])
            found[name] = value.astype(np.float32)
    return found


def differing(a, b, ulps=0):
    """Names of matrices that are not the same; ulps: of their magnitude, that a scale spelt as its reciprocal may be off."""
    near = lambda x, y: x.shape == y.shape and (np.abs(x - y) <= ulps * 2.0**-23 * np.abs(y)).all() and (np.signbit(x) == np.signbit(y)).all()
    return [n for n in sorted(set(a) | set(b)) if n not in a or n not in b or not near(a[n], b[n])]


def make_source(rng, path):
    heads, kv = rng.choice([(4, 2), (8, 2), (8, 8), (6, 2), (12, 4), (4, 1)])
    family = rng.choice(["m1", "m2", "m2", "m3", "m3"])
    own = ({"mxfp8": rng.random() < 0.5, "dense_intermediate_size": rng.choice([96, 192]), "shared_intermediate_size": rng.choice([64, 96])} if family == "m3" else
           {"attn_type_list": [0, 1] if family == "m1" else [1, 1]})
    packed_files.source(path, family=family, num_hidden_layers=2, **own, hidden_size=rng.choice([64, 128, 160, 256]),
                        intermediate_size=rng.choice([64, 96, 192, 224, 320, 384]), num_attention_heads=heads, num_key_value_heads=kv,
                        head_dim=rng.choice([16, 32, 48]), num_local_experts=rng.choice([4, 8]), vocab_size=rng.choice([264, 264, 265, 300]))
    with open(path + "/model.safetensors", "r+b") as f:  # ids that were never trained
        (n,) = struct.unpack("<Q", f.read(8))
        t = json.loads(f.read(n))["lm_head.weight"]
        begin, width = 8 + n + t["data_offsets"][0], (t["data_offsets"][1] - t["data_offsets"][0]) // t["shape"][0]
        for row in rng.choice([[], [5], [0, 7, 263], list(range(200, 264))]):
            f.seek(begin + row * width)
            f.write(bytes(width) if rng.random() < 0.8 else b"\0\x80" * (width // 2))
    if rng.random() < 0.4:
        add_kv_scales(rng, path, kv, [1] if family == "m1" else [0, 1])
    with open(path + "/act-scales.json", "w", encoding="utf-8") as f:
        json.dump({name[: -len("weight")] + "activation_scale": 0.5 + i % 97 / 64 for i, name in enumerate(read_safetensors(path)) if name.endswith(".weight")}, f)
    return heads


def read_safetensors(path):
    with open(path + "/model.safetensors", "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        return json.loads(f.read(n))


def logits(path):
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        t = json.loads(f.read(n))["logits.x"]
        f.seek(8 + n + t["data_offsets"][0])
        return np.frombuffer(f.read(t["data_offsets"][1] - t["data_offsets"][0]), "<f4").reshape(t["shape"]).astype("f8")


def spelt(options):
    """--head as the rule of its tensor that it is."""
    if "--head" not in options:
        return options
    at = options.index("--head")
    rest = options[:at] + options[at + 2:]
    line = rest.index("--quant") + 1
    return [*rest[:line], f"{rest[line]}; lm_head.weight={options[at + 1]}", *rest[line + 1:]]


def add_kv_scales(rng, path, heads, layers):
    """Scales of a KV cache behind the other tensors: one for a layer or one for each head, of k and v or of both."""
    header = read_safetensors(path)
    with open(path + "/model.safetensors", "rb") as f:
        data = f.read()
    data = data[8 + struct.unpack("<Q", data[:8])[0]:]
    for layer in layers:
        for name in rng.choice([["k_scale", "v_scale"], ["kv_scale"], ["k_scale", "v_scale", "q_scale"]]):
            count = 1 if name == "q_scale" else rng.choice([1, heads])
            more = struct.pack(f"<{count}f", *(0.25 + rng.randrange(1000) / 512 for _ in range(count)))
            header[f"model.layers.{layer}.self_attn.{name}"] = {"dtype": "F32", "shape": [count], "data_offsets": [len(data), len(data) + len(more)]}
            data += more
    text = json.dumps(header).encode()
    with open(path + "/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


class Sequence:
    def __init__(self, number):
        self.number, self.rng, self.log = number, random.Random(f"{SEED} {number}"), []
        self.dir = tempfile.mkdtemp(dir=work)
        self.n = 0

    def wrong(self, what):
        raise Wrong(f"sequence {self.number} of seed {SEED}: {what}\n  " + "\n  ".join(self.log[-14:]))

    def fresh(self):
        self.n += 1
        return f"{self.dir}/{self.n}"

    def call(self, program, *args, kill=None, after=0.0):
        p = subprocess.Popen([f"{BIN}/minimax-{program}", *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if kill:
            time.sleep(after)
            p.send_signal(kill)
        err = p.communicate()[1].decode(errors="replace")
        count("runs")
        rc = p.returncode
        last = err.splitlines()[-1] if err.splitlines() else ""
        self.log.append(f"{rc}: minimax-{program} {' '.join(args)}: {last}")
        if rc == 1 or rc < 0 and -rc != kill or "Sanitizer" in err or "runtime error" in err:
            self.wrong(f"status {rc}: {err[:3000]}")
        return rc, last

    def code(self, line):
        return line.split(": ")[2] if ": error: " in line else ""

    def direct(self, source, options):
        """(path or None, status, code) of a conversion at once."""
        out = self.fresh()
        rc, line = self.call("convert", source, "-o", out, "-q", *options)
        return (out if rc == 0 else None), rc, self.code(line)

    def disturbed(self, source, options, foreign):
        """The same, with interruptions; `foreign`: lists of options of other plans."""
        rng, out = self.rng, self.fresh()
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            how = ["--part", rng.choice(["0/2", "1/2", "1/3"])] if rng.random() < 0.2 else []
            self.call("convert", source, "-o", out, "--resume", *options, *self.pace(), *how, kill=rng.choice([signal.SIGTERM, signal.SIGKILL]),
                      after=rng.uniform(0.003, 0.12))
            count("interruptions")
            if foreign and rng.random() < 0.3 and not os.path.exists(out) and any(".journal" in n for n in os.listdir(self.dir)):
                other = rng.choice(foreign)
                before = self.lies()
                rc, line = self.call("convert", source, "-o", out, "--resume", "-q", *other)
                if rc == 0 and files(out) == files(self.direct(source, other)[0]):
                    shutil.rmtree(out)  # no other plan after all, its words or sizes come to the same; or nothing to resume
                    continue
                if rc == 0 or (rc == 2 and self.lies() != before):
                    self.wrong(f"another plan's run resumed: {other}, {line}")
                count("refusals")
                if rc != 2 and self.lies() != before:
                    self.wrong(f"a refusal changed files: {other}, {line}")
        rc, line = self.call("convert", source, "-o", out, "--resume", "-q", *options, *self.pace())
        return (out if rc == 0 else None), rc, self.code(line)

    def lies(self):
        return {os.path.join(w, n): (os.stat(os.path.join(w, n)).st_size, os.stat(os.path.join(w, n)).st_mtime_ns) for w, _, ns in os.walk(self.dir)
                for n in ns if ".partial" in w + n and not n.endswith(".lock")}

    def pace(self):
        rng = self.rng
        return ["-j", str(rng.randrange(1, 5)), "--journal-every", rng.choice(["1K", "16K", "200K"])]

    def recipe(self):
        rng = self.rng
        line = rng.choice(SCHEMES)
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            line += f"; {rng.choice(PATTERNS)}={rng.choice(SCHEMES)}"
        return line

    def plan(self):
        plan = ["--quant", self.recipe(), "--allow-unmatched"]
        return plan + (["--head", self.rng.choice(SCHEMES[1:])] if self.rng.random() < 0.4 else [])

    def other_head(self, plan):
        """The same but for the head's scheme."""
        if "--head" not in plan:
            return [*plan, "--head", self.rng.choice(SCHEMES[1:])]
        at = plan.index("--head")
        return plan[:at] + (["--head", self.rng.choice([x for x in SCHEMES[1:] if x != plan[at + 1]])] if self.rng.random() < 0.5 else []) + plan[at + 2:]

    def runs(self, here):
        """Logits of eight tokens, of this cut and of one rank."""
        whole, found = self.direct(here, ["--tp", "1", "--tp-align", "split"])[0], []
        for path in (here, whole):
            rc, line = self.call("eval", path, "--logits", path + ".logits", "--ids-from", self.dir + "/ids.safetensors", "--act-quant", "off", "-q", "--threads", "1")
            if rc:
                self.wrong(f"a checkpoint that does not run: {line}")
            found.append(logits(path + ".logits"))
        never = found[1] == -np.inf  # ids whose rows of the head are zero
        apart, size = (np.abs(x[~never]).max() for x in (found[0] - np.where(never, 0, found[1]), found[1]))
        if (never != (found[0] == -np.inf)).any() or not apart <= 1e-4 * size:
            self.wrong(f"logits of {here} and of one rank are {apart} apart, of {size}, or other ids are never chosen")
        count("logits")

    def shape(self):
        rng = self.rng
        tp = rng.choice([t for t in (1, 2, 3, 4, 6, 8, 12) if self.heads % t == 0 or rng.random() < 0.02])
        ep = rng.choice([e for e in (1, 1, 2, 4) if tp % e == 0])
        o = ["--tp", str(tp), "--ep", str(ep), "--pp", rng.choice(["1", "1", "2"]), "--tp-align", rng.choice(["split"] * 4 + ["pad"] * 4 + ["error"])]
        return o + ["--part-size", rng.choice(["20K", "100K", "1M"])]

    def layout(self):
        return ["--layout", "hf", "--part-size", self.rng.choice(["50K", "1M"])] + self.rng.choice([[], [], ["--dialect", "ct"], ["--dialect", "fp8"], ["--dialect", "modelopt"]])

    def some(self, shape):
        """Options of an output that is no whole checkpoint: an archive, or files of some ranks."""
        ranks = int(shape[1]) * int(shape[5])
        return self.rng.choice([["--compress", "zstd"], ["--ranks", ",".join(str(r) for r in range(ranks) if r == 0 or self.rng.random() < 0.5)]])

    def same(self, got, expected, what, whole=True):
        (path, rc, code), (other, rc2, code2) = got, expected
        if (rc, code) != (rc2, code2):
            self.wrong(f"{what}: found status {rc} {code}, expected {rc2} {code2}")
        if path and files(path) != files(other):
            a, b = files(path), files(other)
            self.wrong(f"{what}: other bytes in {[n for n in sorted(set(a) | set(b)) if a.get(n) != b.get(n)]}: {path} {other}")
        count("equal" if path else "both refused")
        if path and whole:
            self.proven(path, None)

    def proven(self, path, source):
        rc, line = self.call("verify", path, "-q", *(["--source", source] if source else []))
        if rc:
            self.wrong(f"made and refused by verify: {line}")

    def run(self):
        rng = self.rng
        source = self.dir + "/source"
        self.heads = make_source(rng, source)
        with open(self.dir + "/ids.safetensors", "wb") as f:
            text = json.dumps({"ids.x": {"dtype": "I32", "shape": [8], "data_offsets": [0, 32]}}).encode()
            f.write(struct.pack("<Q", len(text)) + text + struct.pack("<8i", *(rng.randrange(8, 264) for _ in range(8))))
        plan = self.plan()
        recipe = spelt(plan)[1]
        static = rng.random() < 0.25 and any(s in recipe for s in ("tensor_wise_fp8", "w4afp8", "nvfp4")) and "a16" not in recipe
        if static:
            plan += ["--act-scales", source + "/act-scales.json"]
        first = [*plan, *self.shape()]
        here = self.disturbed(source, first, [[*plan, *self.shape()[:-1], "70K"], [*plan[:1], "mxfp8", *first[2:]], [*plan, *first[len(plan):], "--allow-nonfinite"],
                                              [*self.other_head(plan), *first[len(plan):]], [*self.other_head(plan), *first[len(plan):]]])
        self.same(here, self.direct(source, spelt(first)), "a resumed conversion")
        here = here[0]
        if not here:
            return
        if rng.random() < 0.5:
            self.proven(here, source)
        for _ in range(rng.randrange(1, 5)):
            step = rng.choice(["reshard", "reshard", "hf", "archive", "again", "run"])
            if step == "reshard":
                o = self.shape()
                some = self.some(o) if rng.random() < 0.3 else []
                got = self.disturbed(here, [*o, *some], [[*self.shape()[:-1], "70K"], self.layout(), *([o] if some else [])])
                self.same(got, self.direct(source, [*plan, *o, *some]), "a cut for other ranks", not some)
                here = got[0] if got[0] and not some else here
            elif step == "archive":
                self.archive(here)
            elif step == "hf" and not static:  # there an expert has its own scale, where the packed ones have one for all
                o = self.layout()
                got = self.disturbed(here, o, [self.shape()])
                self.same(got, self.direct(source, [*plan, *o]), "--layout hf")
                if got[0]:
                    self.back(got[0], here)
            elif step == "run":
                self.runs(here)
            elif step == "again":
                here, source, plan = self.again(here, source, plan)
                static = False

    def archive(self, here):
        packed, back = self.fresh(), self.fresh()
        for how, a, b in (("pack", here, packed), ("unpack", packed, back)):
            for kill in [signal.SIGKILL] * self.rng.choice([0, 0, 1]) + [None]:
                if os.path.exists(b):  # it was published before the signal came
                    break
                rc, _ = self.call("archive", how, a, "-o", b, "-q", kill=kill, after=self.rng.uniform(0.002, 0.05))
            if not os.path.exists(b):
                self.wrong(f"{how} failed: {rc}")
        if files(here) != files(back):
            self.wrong("an archive gives other bytes back")
        count("equal")

    def back(self, unsharded, here):
        """Our own unsharded files, packed as they are: the same weights."""
        o = self.shape()
        got = self.disturbed(unsharded, o, [self.layout()])
        if not got[0]:
            if got[1] not in (2, 4):
                self.wrong("our own unsharded files are refused")
            return
        self.proven(got[0], unsharded if self.rng.random() < 0.3 else None)
        reciprocal = b"global_scale" in open(unsharded + "/model.safetensors.index.json", "rb").read()  # of compressed-tensors, of NVFP4's matrices
        wrong = differing(dequantised(got[0]), dequantised(here), 2 if reciprocal else 0)
        if wrong:
            self.wrong(f"other weights after --layout hf: {wrong[:5]}")
        count("equal weights")

    def again(self, here, source, plan):
        """A second quantisation, of this cut and of another."""
        o = self.plan()
        other = self.direct(here, ["--tp", "1", "--tp-align", "split"])[0]
        shape = self.shape()
        a, b = self.disturbed(here, [*o, *shape], [[*o, *self.layout()]]), self.direct(other, [*o, *shape])
        if a[1:] != b[1:]:
            self.wrong(f"a second quantisation: {a[1:]} of one cut, {b[1:]} of another")
        if not a[0]:
            return here, source, plan
        if {n: d for n, d in files(a[0]).items() if not n.startswith("m")} != {n: d for n, d in files(b[0]).items() if not n.startswith("m")} or differing(dequantised(a[0]), dequantised(b[0])):
            self.wrong("a second quantisation is another of another cut")
        self.proven(a[0], here)
        count("equal weights")
        if spelt(o)[1] == "none":
            return a[0], source, plan
        return a[0], here, o


def sequence(number):
    with guard:
        if figures["wrong"] >= 5:
            return
    s = Sequence(number)
    try:
        s.run()
        count("sequences")
        if not ONLY:
            shutil.rmtree(s.dir)
    except Wrong as e:
        count("wrong")
        print(e, flush=True)
    except Exception as e:  # a reader of the results that fails is a finding as well
        count("wrong")
        print(f"sequence {number} of seed {SEED}: {type(e).__name__}: {e}\n  " + "\n  ".join(s.log[-8:]), flush=True)


try:
    with ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count() or 2))) as pool:
        list(pool.map(sequence, [int(ONLY)] if ONLY else range(COUNT)))
    print(f"{figures['sequences']} sequences, {figures['runs']} runs, {figures['interruptions']} signals: {figures['equal']} results byte for byte those of one conversion, "
          f"{figures['equal weights']} with the same weights bit for bit, {figures['both refused']} refused alike, {figures['refusals']} runs of other plans refused, {figures['logits']} cuts with one rank's logits, "
          f"{figures['wrong']} wrong (seed {SEED})")
finally:
    if not ONLY and not figures["wrong"]:
        shutil.rmtree(work, ignore_errors=True)
sys.exit(figures["wrong"] > 0)
