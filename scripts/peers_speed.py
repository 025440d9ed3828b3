#!/usr/bin/env python3
"""Conversion of one BF16 checkpoint by this tool and by others on the CPU: outputs compared first, then times, taking turns.

  peers_speed.py BIN WORK [--layers 1] [--experts 8] [--rounds 3] [--only NAME,…]

BIN is the folder of the programs, WORK an empty folder on the disk to be measured. The checkpoint is M2-shaped with Student-t weights. Peers
that are not installed (pip install torch safetensors ml_dtypes llmcompressor auto-round) or fail (auto-round fetches a dataset) are said so; their time begins after
their imports, except auto-round's command, whose imports count. Ours is the whole program. Each scheme's row gives the SQNR of a sample of
weights, dequantised from what was written, and the median and best wall time of the rounds, in which everybody runs once in turn; then the
median of CPU seconds, which other load on the machine hardly changes."""
import argparse
import glob
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
IGNORE = ["lm_head", "re:.*block_sparse_moe\\.gate$", "re:.*embed_tokens"]


def clock():
    """Wall and CPU seconds, of finished children as well."""
    t = os.times()
    return t.elapsed, t.user + t.system + t.children_user + t.children_system


def since(start):
    return [now - then for then, now in zip(start, clock())]


def linear(name):
    return name.endswith(".weight") and ("_proj" in name or ".experts." in name)


# ---- the peers, each in a process of its own ----

def rewrite(src, out, framework, save_file, quantise):
    """A copy in which every linear is what quantise makes of it: codes and scales."""
    from safetensors import safe_open
    start = clock()
    os.mkdir(out)
    for path in sorted(glob.glob(src + "/*.safetensors")):
        tensors = {}
        with safe_open(path, framework) as f:
            for name in f.keys():
                w = f.get_tensor(name)
                if linear(name):
                    tensors[name], tensors[name + "_scale_inv"] = quantise(w)
                else:
                    tensors[name] = w
        save_file(tensors, f"{out}/{os.path.basename(path)}")
    return since(start)


def torch_script(src, out):
    import torch
    from safetensors.torch import save_file

    def quantise(w):
        n, k = w.shape
        b = w.float().view(n // 128, 128, k // 128, 128)
        s = b.abs().amax((1, 3)) / 448
        return (b / s[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(n, k), s

    return rewrite(src, out, "pt", save_file, quantise)


def numpy_loop(src, out):
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    def quantise(w):
        n, k = w.shape
        codes, scale = np.empty((n, k), ml_dtypes.float8_e4m3fn), np.empty((n // 128, k // 128), "f4")
        for i in range(0, n, 128):
            for j in range(0, k, 128):
                block = w[i:i + 128, j:j + 128].astype("f4")
                s = np.abs(block).max() / np.float32(448)
                scale[i // 128, j // 128] = s
                codes[i:i + 128, j:j + 128] = (block / s).astype(ml_dtypes.float8_e4m3fn)
        return codes, scale

    return rewrite(src, out, "np", save_file, quantise)


def llm_compressor(scheme):
    def run(src, out):
        from llmcompressor import model_free_ptq
        start = clock()
        model_free_ptq(src, out, scheme=scheme, ignore=IGNORE, device="cpu", max_workers=2)
        return since(start)
    return run


def auto_round(scheme):
    def run(src, out):
        start = clock()
        done = subprocess.run([sys.executable, "-m", "auto_round", src, "--model_free", "--format", "auto_round", "--scheme", scheme, "--device_map", "cpu",
                               "--output_dir", out], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(next((x for x in reversed(done.stdout.splitlines()) if "Error" in x), done.stdout[-200:]))
        return since(start)
    return run


PEERS = {  # name: (scheme of ours, module, function)
    "torch script": ("block_fp8", "torch", torch_script), "numpy + ml_dtypes": ("block_fp8", "ml_dtypes", numpy_loop),
    "llm-compressor FP8_BLOCK": ("block_fp8", "llmcompressor", llm_compressor("FP8_BLOCK")),
    "llm-compressor NVFP4A16": ("nvfp4a16", "llmcompressor", llm_compressor("NVFP4A16")),
    "llm-compressor W4A16": ("w4a16", "llmcompressor", llm_compressor("W4A16")),
    "auto-round W4A16": ("w4a16", "auto_round", auto_round("W4A16"))}


# ---- ours ----

def ours(args, src, out, scheme, search, layout):
    start = clock()
    subprocess.run([f"{args.bin}/minimax-convert", src, "-o", out, "--quant", scheme, "--search", search, "--quiet", *layout], check=True)
    return since(start)


# ---- weights as they come back ----

class Folder:
    """Tensors of all safetensors files below a folder, as raw bytes."""

    def __init__(self, path):
        self.at = {}
        for file in glob.glob(path + "/**/*.safetensors", recursive=True):
            with open(file, "rb") as f:
                size = int.from_bytes(f.read(8), "little")
                for name, t in json.loads(f.read(size)).items():
                    if name != "__metadata__":
                        self.at[name] = (file, t["dtype"], t["shape"], 8 + size + t["data_offsets"][0])

    def get(self, name):
        import ml_dtypes
        import numpy as np
        file, dtype, shape, at = self.at[name]
        kind = {"BF16": ml_dtypes.bfloat16, "F16": "f2", "F32": "f4", "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": "u1", "I32": "i4", "I64": "i8"}[dtype]
        x = np.memmap(file, kind, "r", at, tuple(shape) or (1,))
        return x if x.dtype.kind in "iu" else np.asarray(x).astype("f4")

    def weight(self, name, n, k):
        """A linear's weight, dequantised by whichever names its tensors have."""
        import numpy as np
        base = name[:-len(".weight")]
        if name + "_scale_inv" in self.at or (base + ".weight_scale" in self.at and name in self.at):
            s = self.get(name + "_scale_inv" if name + "_scale_inv" in self.at else base + ".weight_scale")
            return self.get(name) * np.repeat(np.repeat(s, n // s.shape[0], 0), k // s.shape[1], 1)
        if base + ".weight_packed" in self.at:
            packed = self.get(base + ".weight_packed").view("u1").reshape(n, k // 2)
            codes = np.stack([packed & 15, packed >> 4], -1).reshape(n, k)
            scale = self.get(base + ".weight_scale")
            if base + ".weight_global_scale" in self.at:
                value = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6], "f4")
                return value[codes] * np.repeat(scale / self.get(base + ".weight_global_scale"), 16, 1)
            return (codes.astype("f4") - 8) * np.repeat(scale, k // scale.shape[1], 1)
        words = self.get(base + ".qweight")  # GPTQ: [k / 8, n], symmetric
        codes = np.stack([words.view("u4") >> 4 * i & 15 for i in range(8)], 1).reshape(k, n)
        scale = self.get(base + ".scales")
        return ((codes.astype("f4") - 8) * np.repeat(scale, k // scale.shape[0], 0)).T


def sqnr(source, packed):
    import numpy as np
    names = [n for n in sorted(source.at) if linear(n)]
    signal = noise = 0.0
    for name in names[::max(1, len(names) // 6)]:
        w = source.get(name).astype("f8")
        signal += (w * w).sum()
        noise += ((packed.weight(name, *w.shape) - w) ** 2).sum()
    return 10 * np.log10(signal / noise)


def same_bytes(a, b):
    """Codes and scales of block FP8, tensor by tensor."""
    names = [n for n in a.at if linear(n)]
    spell = next(s for s in ("_scale_inv", "_scale") if names[0] + s in b.at or names[0][:-7] + ".weight" + s in b.at)
    return all((a.get(n).view("u4") == b.get(n).view("u4")).all() and (a.get(n + "_scale_inv") == b.get(n + spell)).all() for n in names)


# ---- the run ----

def fixture(args):
    import numpy as np
    src = os.path.join(args.work, "src")
    subprocess.run([sys.executable, os.path.join(HERE, "bench_checkpoint.py"), src, "--bf16", "--layers", str(args.layers), "--experts",
                    str(args.experts), "--files", "4"], check=True, stdout=subprocess.DEVNULL)
    for path in glob.glob(os.path.join(HERE, "../tests/data/tiny-m2/tokenizer*.json")):  # auto-round asks for one
        shutil.copy(path, src)
    rng = np.random.default_rng(3)
    pool = (0.02 * rng.standard_t(5, 1 << 22)).astype("f4").view("u4")
    pool = ((pool + 0x7FFF + (pool >> 16 & 1)) >> 16).astype("u2")
    for i, (name, (file, dtype, shape, at)) in enumerate(Folder(src).at.items()):
        if linear(name):
            w = np.memmap(file, "u2", "r+", at, tuple(shape)).reshape(-1)
            for begin in range(0, w.size, pool.size):
                w[begin:begin + pool.size] = np.roll(pool, 1009 * (i + begin))[:w.size - begin]
    return src


def child(name, src, out):
    print("\nseconds", *PEERS[name][2](src, out))


def peer(name, src, out):
    done = subprocess.run([sys.executable, __file__, "--child", name, src, out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return [float(x) for x in done.stdout.rsplit("seconds ", 1)[1].split()]


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bin")
    p.add_argument("work")
    for name, default in (("layers", 1), ("experts", 8), ("rounds", 3)):
        p.add_argument("--" + name, type=int, default=default)
    p.add_argument("--only", default=",".join(PEERS))
    args = p.parse_args()
    src = fixture(args)
    source, out = Folder(src), os.path.join(args.work, "out")
    size = sum(os.path.getsize(f) for f in glob.glob(src + "/*.safetensors")) / 1e9
    there = []
    for name in args.only.split(","):
        if importlib.util.find_spec(PEERS[name][1]):
            there.append(name)
        else:
            print(f"{name}: not installed")
    print(f"{size:.3f} GB of BF16, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    for scheme in dict.fromkeys(PEERS[name][0] for name in there):
        runs = {"cp": lambda: subprocess.run(["cp", "-r", src, out], check=True)}
        for search in ("absmax",) if scheme == "block_fp8" else ("absmax", "mse"):
            runs[f"ours {search}"] = lambda search=search: ours(args, src, out, scheme, search, ["--layout", "hf"])
        for name in there:
            if PEERS[name][0] == scheme:
                runs[name] = lambda name=name: peer(name, src, out)
        reference, seconds, notes = None, {name: [] for name in runs}, {}
        for turn in range(args.rounds):
            for name, run in list(runs.items()):
                shutil.rmtree(out, ignore_errors=True)
                start = clock()
                try:
                    seconds[name].append(run() if name != "cp" else (run(), since(start))[1])
                    if turn == 0 and name != "cp":
                        packed = Folder(out)
                        notes[name] = f"SQNR {sqnr(source, packed):.2f} dB"
                        if scheme == "block_fp8" and name.startswith("ours"):
                            shutil.rmtree(out + "-ours", ignore_errors=True)
                            os.rename(out, out + "-ours")
                            reference = Folder(out + "-ours")
                        elif reference is not None and scheme == "block_fp8":
                            notes[name] += ", bytes equal" if same_bytes(reference, packed) else ", other bytes"
                except (RuntimeError, subprocess.CalledProcessError, KeyError, StopIteration) as e:
                    notes[name] = f"failed: {e}"[:200]
                    del runs[name]
        wall, cpu = map(statistics.median, zip(*seconds["ours absmax"]))
        for name, took in seconds.items():
            if took:
                middle, work = map(statistics.median, zip(*took))
                print(f"| {scheme} | {name} | {middle:.2f} s | {min(took)[0]:.2f} s | {size / middle:.3f} GB/s | {middle / wall:.1f} x | {work:.2f} s | "
                      f"{work / cpu:.1f} x | {notes.get(name, '')} |", flush=True)
            else:
                print(f"| {scheme} | {name} | | | | | | | {notes.get(name, '')} |", flush=True)
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
        shutil.rmtree(out + "-ours", ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(src)
    return 0


sys.exit(main())
