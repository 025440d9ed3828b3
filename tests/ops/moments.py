#!/usr/bin/env python3
"""moments.py NAME CPU CUDA: two files of minimax-eval --collect, of one text on both devices, one line `ok` or `FAIL` for NAME. moments.py --first A B: whether
layer 0's attention was given the very same. No packages.

Limits. The GPU's hidden states lie within 1.5e-2 of the CPU's (tests/ops/test_models.cu), and Σ|a² - b²| is at most |a - b|·|a + b|: squares
differ by 3.1e-2 of their sum. Of experts' choices at most 3e-2 are others, where two are nearly tied (the same file); such a row is missing here
and too much there. Rows of other matrices are counted alike, and so are those of all experts together."""
import array
import json
import statistics
import sys

NEAR, CHOICES = 3.1e-2, 3e-2
FIRST = "model.layers.0.self_attn.qkv_proj.weight"


def read(path):
    """{name: list of numbers}, [shape]"""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        start = f.tell()
        out = {}
        for name, t in header.items():
            if name == "__metadata__":
                continue
            f.seek(start + t["data_offsets"][0])
            values = array.array({"F32": "f", "I64": "q"}[t["dtype"]])
            values.frombytes(f.read(t["data_offsets"][1] - t["data_offsets"][0]))
            out[name] = (t["shape"], values)
    return out


def main():
    title, cpu, cuda = sys.argv[1], read(sys.argv[2]), read(sys.argv[3])
    if title == "--first":
        sys.exit(any(cpu[f"{FIRST}.{what}"] != cuda[f"{FIRST}.{what}"] for what in ("mean_square", "amax", "rows")))
    same = {n: s for n, (s, _) in cpu.items()} == {n: s for n, (s, _) in cuda.items()}
    worst = {"squares": 0.0, "experts' squares": 0.0, "amax": 0.0, "rows": 0.0}
    for name in [n[:-len(".rows")] for n in cpu if same and n.endswith(".rows")]:
        rows, other = cpu[name + ".rows"][1], cuda[name + ".rows"][1]
        experts = len(rows) > 1
        same = same and sum(rows) == sum(other) and (experts or rows == other)
        worst["rows"] = max(worst["rows"], sum(abs(a - b) for a, b in zip(rows, other)) / sum(rows))
        k = len(cpu[name + ".mean_square"][1]) // len(rows)
        a = [v * rows[i // k] for i, v in enumerate(cpu[name + ".mean_square"][1])]
        b = [v * other[i // k] for i, v in enumerate(cuda[name + ".mean_square"][1])]
        what = "experts' squares" if experts else "squares"
        worst[what] = max(worst[what], sum(abs(x - y) for x, y in zip(a, b)) / sum(a))
        amax = [abs(x - y) / x for x, y in zip(cpu[name + ".amax"][1], cuda[name + ".amax"][1]) if x > 0]
        worst["amax"] = max(worst["amax"], statistics.median(amax))
    limit = {"squares": NEAR, "experts' squares": NEAR + CHOICES, "amax": NEAR, "rows": CHOICES}
    ok = same and all(worst[w] <= limit[w] for w in limit)  # a NaN is not
    print("ok  " if ok else "FAIL", f"collect {title}:", "" if same else "other tensors or numbers of rows;",
          ", ".join(f"{w} {worst[w]:.1e} (limit {limit[w]:.1e})" for w in limit), f"of {len(cpu) // 3} matrices")


main()
