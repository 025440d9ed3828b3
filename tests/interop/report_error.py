#!/usr/bin/env python3
"""minimax-verify --report: every figure of every tensor computed again with numpy from the packed parts and the source, the three formats
saying the same, --min-sqnr refusing what is below it, --allow-nonfinite counted. Weights are new in every run; the seed is printed."""
import csv
import json
import math
import os
import re
import secrets
import subprocess
import sys
import xml.dom.minidom

import ml_dtypes
import numpy as np
from packed import Packed

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from convert_files import small

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], "f4")
SCALE = {"F32": lambda s: s.view("f4"), "BF16": lambda s: (s.astype("u4") << 16).view("f4"), "U8": lambda s: np.exp2(s.astype("f8") - 127).astype("f4"),
         "F8_E4M3": lambda s: s.view(ml_dtypes.float8_e4m3fn).astype("f4")}


def nibbles(codes):
    return codes >> 4 * (np.arange(codes.shape[-1]) % 2).astype("u1") & 15


SCHEMES = {  # values of codes that lie one to a weight, and the step between the largest two
    "block_fp8": (lambda c: c.view(ml_dtypes.float8_e4m3fn).astype("f4"), 32), "int8": (lambda c: c.view("i1").astype("f4"), 1),
    "nvfp4": (lambda c: E2M1[nibbles(c)], 2), "mxfp4": (lambda c: E2M1[nibbles(c)], 2), "w4a16": (lambda c: nibbles(c).astype("f4") - 8, 1)}


def run(*args):
    return subprocess.run(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)


def number(data):
    return (np.frombuffer(data, "<u2").astype("u4") << 16).view("<f4")


def checkpoint(seed, path):
    """Heavy-tailed weights, some rows far smaller than others; one NaN and two infinities in one expert. Returns {name: bf16 bytes}."""
    rng = np.random.default_rng(seed)
    c = small(hidden=160, heads=4, kv=2, dim=32, experts=2, inter=96, vocab=16, layers=2, fp8=False)
    for name, (dtype, shape, _) in c.tensors.items():
        if len(shape) == 2 and dtype == "BF16":
            w = rng.standard_t(4, shape) * 0.02 * 2.0 ** rng.integers(-6, 1, (shape[0], 1))
            bits = w.astype(ml_dtypes.bfloat16).view("<u2")
            if name.endswith("layers.1.block_sparse_moe.experts.1.w2.weight"):
                bits[3, 5], bits[7, 0], bits[159, 95] = 0x7FC1, 0x7F80, 0xFF80
            c.tensors[name] = (dtype, shape, bits.tobytes())
    c.save(path)
    return {name: data for name, (_, _, data) in c.tensors.items()}


def expected(pack, source, t, values, step):
    w, v, s, lost = [], [], [], 0
    for planes in zip(*(pack.whole(t, p) for p in t["planes"])):
        for e in range(t["whole_lead"] or 1):
            x = number(source[planes[0][0].replace("{e}", str(e))])
            bad = ~np.isfinite(x)
            lost += int(bad.sum())
            scale = np.ones(x.size, "f4")
            for (_, elements), p in zip(planes[1:], t["planes"][1:]):
                scale = scale * SCALE[p["dtype"]](np.ascontiguousarray(elements[e]).ravel())
            w.append(np.where(bad, 0, x).astype("f8"))
            v.append((values(np.ascontiguousarray(planes[0][1][e])).ravel() * scale).astype("f8"))
            s.append(np.abs(scale.astype("f8")))
    # Pieces of an expert lie one behind the other: piece by piece, expert by expert.
    leads = t["whole_lead"] or 1
    own = [10 * np.log10(sum((x * x).sum() for x in w[e::leads]) / sum(((x - y) ** 2).sum() for x, y in zip(w[e::leads], v[e::leads])))
           for e in range(leads)]
    w, v, s = (np.concatenate(x) for x in (w, v, s))
    d = v - w
    return {"count": w.size, "nonfinite": lost, "sqnr_db": 10 * np.log10((w * w).sum() / (d * d).sum()), "rmse": np.sqrt((d * d).mean()),
            "max_abs": np.abs(d).max(), "cosine": (w * v).sum() / np.sqrt((w * w).sum() * (v * v).sum()),
            "clipped_share": (np.abs(d) > step / 2 * s * (1 + 1e-4)).mean(), "flushed_share": ((w != 0) & (v == 0)).mean(),
            "least_scale": s.min(), "most_scale": s.max()} | \
        ({"worst_expert": int(np.argmin(own)), "worst_expert_sqnr_db": min(own)} if t["whole_lead"] else {})


def check(scheme, source):
    """One scheme; returns the command and the report."""
    out = os.path.join(TMP, scheme)
    done = run(f"{BIN}/minimax-convert", f"{TMP}/src", "-o", out, "--quant", scheme, "--tp", "2", "--allow-nonfinite")
    assert done.returncode == 0 and "3 weights were NaN or infinite and are stored as 0\n" in done.stderr, done.stderr
    verify = [f"{BIN}/minimax-verify", out, "--quiet", "--source", f"{TMP}/src"]
    for ending in ("json", "csv", "html"):
        done = run(*verify, "--report", f"{TMP}/{scheme}.{ending}")
        assert done.returncode == 0, done.stderr
    with open(f"{TMP}/{scheme}.json", encoding="utf-8") as f:
        report = json.load(f)
    assert json.loads(run(*verify, "--json").stdout) == report
    rows, pack = {row["name"]: row for row in report["tensors"]}, Packed(out)
    for t in pack.manifest["tensors"]:
        row = rows.pop(t["name"])
        assert row["scheme"] == t["scheme"]
        if t["scheme"] != scheme:
            assert "sqnr_db" not in row and row["max_abs"] == 0 and row["cosine"] > 1 - 1e-12, row
            continue
        for key, want in expected(pack, source, t, *SCHEMES[scheme]).items():
            if abs(row[key] - want) > 1e-9 * abs(want):
                sys.exit(f"{scheme} {t['name']}: {key} is {row[key]}, expected {want}")
    assert not rows
    return verify, report


def check_csv(path, report):
    with open(path, encoding="utf-8", newline="") as f:
        for line, row in zip(csv.DictReader(f), report["tensors"], strict=True):
            assert {key: line[key] for key in ("name", "scheme")} == {key: row[key] for key in ("name", "scheme")}
            for key in set(line) - {"name", "scheme"}:
                assert line[key] == "" and key not in row or float(line[key]) == row[key], (line, row)


def check_map(svg):
    """Cells in a grid inside the picture, a column a kind and a row a layer, each under its own label."""
    number = lambda n, key: float(n.getAttribute(key))  # noqa: E731
    width, height = number(svg, "width"), number(svg, "height")
    texts = svg.getElementsByTagName("text")
    kind_at = {float(re.search(r"\((\d+),(\d+)\)", n.getAttribute("transform"))[1]): n.firstChild.data for n in texts if n.getAttribute("transform")}
    layer_at = {number(n, "y"): n.firstChild.data for n in texts if not n.getAttribute("transform")}
    whole, top, left = {}, height, width
    for n in svg.getElementsByTagName("rect"):
        layer, kind = n.getElementsByTagName("title")[0].firstChild.data.partition(".layers.")[2].split(":")[0].split(",")[0].split(".", 1)
        x, y, w, h = (number(n, key) for key in ("x", "y", "width", "height"))
        assert 0 <= x and x + w <= width and 0 <= y and y + h <= height and w > 0 and h > 0
        top, left = min(top, y), min(left, x)
        x0, x1, y0, y1, parts = whole.get((layer, kind), (x, x + w, y, y + h, 0))
        assert (y0, y1) == (y, y + h) and (parts == 0 or x == x1 + 1 or x + w + 1 == x0), "the worst expert stands beside its tensor"
        whole[layer, kind] = min(x, x0), max(x + w, x1), y0, y1, parts + 1
    for (layer, kind), (x0, x1, y0, y1, _) in whole.items():
        assert [k for at, k in kind_at.items() if x0 <= at <= x1] == [kind], "a column's label stands over its middle"
        assert [k for at, k in layer_at.items() if y0 <= at <= y1] == [layer], "a row's label stands beside it"
    assert all(number(n, "x") < left for n in texts if not n.getAttribute("transform"))
    assert all(0 < float(re.search(r",(\d+)\)", n.getAttribute("transform"))[1]) < top for n in texts if n.getAttribute("transform"))
    assert len({(x1 - x0, y1 - y0) for x0, x1, y0, y1, _ in whole.values()}) == 1, "cells of one size"


def check_bars(svg):
    """Side by side on one ground, as high as what they count."""
    bars = [n for n in svg.getElementsByTagName("rect") if n.getAttribute("class") == "bar"]
    x, y, w, h = ([float(n.getAttribute(key)) for n in bars] for key in ("x", "y", "width", "height"))
    counts = [int(n.firstChild.data.split(": ")[1]) for n in svg.getElementsByTagName("title")]
    edges = [[float(e) for e in n.firstChild.data.split(":")[0].split(" to ")] for n in svg.getElementsByTagName("title")]
    assert all(a + b <= c < a + b + 2 for a, b, c in zip(x, w, x[1:])) and {round(a + b, 1) for a, b in zip(y, h)} == {max(h)}
    assert all(abs(a - max(h) * c / max(counts + [1])) < 0.06 for a, c in zip(h, counts)) and max(h) == 120
    assert all(a < b for a, b in edges) and all(abs(a[1] - b[0]) < 0.01 for a, b in zip(edges, edges[1:]))
    _, _, right, below = map(int, svg.getAttribute("viewBox").split())
    assert x[-1] + w[-1] < right and max(h) < below
    return edges, counts


def check_table(table, report):
    """Every figure of a row, in the table's rounding."""
    rows = {row["name"]: row for row in report["tensors"]}
    for line in re.findall(r"<tr><td>(.*)", table):
        cells = [re.sub("<[^>]*>", "", x).strip() for x in line.split("<td>")]
        row = rows[cells[0]]
        want = [row["name"], row["scheme"], str(row["count"]), f"{row['sqnr_db']:.2f}" if "sqnr_db" in row else "exact",
                f"{row['worst_expert']}: {row['worst_expert_sqnr_db']:.2f}" if "worst_expert" in row else "", f"{row['rmse']:.3g}",
                f"{row['max_abs']:.3g}", f"{row['cosine']:.7f}", f"{100 * row['clipped_share']:.3g} %", f"{100 * row['flushed_share']:.3g} %",
                f"{row['least_scale']:.3g} … {row['most_scale']:.3g}" if row["most_scale"] > 0 else "", str(row["nonfinite"])]
        assert cells == want, (cells, want)


def check_html(path, report, db):
    with open(path, encoding="utf-8") as f:
        page = f.read()
    svg = [xml.dom.minidom.parseString(x) for x in re.findall(r"<svg.*?</svg>", page, re.S)]
    assert len(svg) == 3 and not re.search(r"<script|https?:|\bsrc=|@import|url\(", page)
    titles = [n.firstChild.data for n in svg[2].getElementsByTagName("title")]
    layered = [row for row in report["tensors"] if ".layers." in row["name"]]
    want = [row["name"] + (f": {row['sqnr_db']:.2f} dB" if "sqnr_db" in row else ": exact") for row in layered]
    want += [f"{row['name']}, expert {row['worst_expert']}, the worst: {row['worst_expert_sqnr_db']:.2f} dB" for row in layered if "worst_expert" in row]
    assert sorted(titles) == sorted(want), "the map shows every tensor of every layer"
    for fact in ("checkpoint", "source", "quant", "packed_by", "compared_by", "manifest_sha256", "plan_sha256"):
        assert report[fact] and f"<dd>{report[fact]}\n" in page, fact
    tables = re.findall(r"<table>.*?</table>", page, re.S)
    assert len(tables) == 3 and all(sorted(re.findall(r"<tr><td>([^<]*)", t)) == sorted(row["name"] for row in report["tensors"]) for t in tables)
    assert re.findall(r"<tr><td>([^<]*)", tables[0]) == [row["name"] for row in report["tensors"]]
    largest = [next(row for row in report["tensors"] if row["name"] == n)["max_abs"] for n in re.findall(r"<tr><td>([^<]*)", tables[2])]
    assert largest == sorted(largest, reverse=True)
    for table in tables:
        check_table(table, report)
    check_map(svg[2].documentElement)
    for plot, values in zip(svg[:2], (db, [math.log10(row["max_abs"]) for row in report["tensors"] if "sqnr_db" in row])):
        edges, counts = check_bars(plot.documentElement)
        for (low, high), count in zip(edges[1:-1], counts[1:-1]):  # the first and the last have what lies beyond
            near = [v for v in values if low - 1e-3 <= v < high + 1e-3]
            assert sum(low + 1e-3 <= v < high - 1e-3 for v in values) <= count <= len(near), (low, high, count)
    assert page.index("class=\"verdict") < page.index("<dl>") and "Look closer." in page, "three weights are not finite"
    for plot in svg[:2]:
        bars = [int(n.firstChild.data.split(": ")[1]) for n in plot.getElementsByTagName("title")]
        assert sum(bars) == len(db), "a histogram counts every tensor that is not exact"


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else secrets.randbits(32)
    print(f"seed {seed}", flush=True)
    source = checkpoint(seed, f"{TMP}/src")
    done = run(f"{BIN}/minimax-convert", f"{TMP}/src", "-o", f"{TMP}/strict", "--quant", "int8")
    assert done.returncode == 3 and "E_NONFINITE" in done.stderr and not os.path.exists(f"{TMP}/strict"), done.stderr
    clipped = flushed = 0
    for scheme in SCHEMES:
        verify, report = check(scheme, source)
        assert sum(row["nonfinite"] for row in report["tensors"]) == 3
        clipped += sum(row["clipped_share"] > 0 for row in report["tensors"])
        flushed += sum(row["flushed_share"] > 0 for row in report["tensors"])
        db = [row["sqnr_db"] for row in report["tensors"] if "sqnr_db" in row]
        assert db == sorted(db) and report["exact_tensors"] == len(report["tensors"]) - len(db)
        check_csv(f"{TMP}/{scheme}.csv", report)
        check_html(f"{TMP}/{scheme}.html", report, db)
    assert clipped and flushed
    assert run(*verify, "--min-sqnr", f"{db[0] - 0.01}").returncode == 0
    low = run(*verify, "--min-sqnr", f"{db[0] + 0.01}")
    assert low.returncode == 6 and "E_SQNR" in low.stderr and report["tensors"][0]["name"] in low.stderr, low.stderr
    for wrong in (verify + ["--report", f"{TMP}/r.txt"], verify[:3] + ["--report", f"{TMP}/x.json"], verify[:3] + ["--min-sqnr", "-3"]):
        assert run(*wrong).returncode == 2
    assert run(*verify, "--report", "/dev/full/r.json").returncode == 5
    print(f"{len(SCHEMES)} schemes: figures equal, JSON = CSV = HTML, --min-sqnr refuses below {db[0]:.2f} dB")


main()
