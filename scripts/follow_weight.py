#!/usr/bin/env python3
"""scripts/follow_weight.py SRC PACKED NAME ROW COL: where one block-FP8 weight of a source matrix lies, there and on each rank of a packed
checkpoint: file, byte, code, scale, value. For the walk through README.md; rules in formats/FORMAT.md."""
import glob
import json
import re
import struct
import sys


def header(path):
    """(name -> (dtype, shape, first byte in the file)) of a safetensors file."""
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        tensors = json.loads(f.read(n))
    return {k: (t["dtype"], t["shape"], 8 + n + t["data_offsets"][0]) for k, t in tensors.items() if k != "__metadata__"}


def show(files, name, cell_name, index, cell_index):
    """Reads a code and its scale: index and cell_index are their coordinates in their tensors."""
    def read(tensor, at, size):
        path, (_, shape, offset) = next((p, t[tensor]) for p, t in files.items() if tensor in t)
        for extent, i in zip(shape, at):
            assert i < extent
        flat = 0
        for extent, i in zip(shape, at):
            flat = flat * extent + i
        with open(path, "rb") as f:
            f.seek(offset + flat * size)
            return f"{path} byte {offset + flat * size}", f.read(size)

    place, code = read(name, index, 1)
    scale_place, scale = read(cell_name, cell_index, 4)
    e, m = code[0] >> 3 & 15, code[0] & 7
    value = ((8 + m) * 2.0 ** (e - 10) if e else m * 2.0**-9) * (-1 if code[0] & 128 else 1)
    (s,) = struct.unpack("<f", scale)
    print(f"{name} {index}\n  code  0x{code[0]:02x} = {value:g}  {place}\n  scale {s:.8g}  {scale_place}\n  weight {value * s:.8g}")


source, packed, name, row, col = sys.argv[1:4] + [int(a) for a in sys.argv[4:6]]
show({p: header(p) for p in glob.glob(f"{source}/*.safetensors")}, name, name + "_scale_inv", [row, col], [row // 128, col // 128])
with open(f"{packed}/manifest.json", encoding="utf-8") as f:
    m = json.load(f)
expert = re.search(r"experts\.(\d+)\.", name)
pattern = re.sub(r"experts\.\d+\.", "experts.{e}.", name)
tensor, piece = next((t, p) for t in m["tensors"] for p in t["pieces"] if p["source"] in (name, pattern))
cut, tp, ep = m["cuts"][piece["cut"]], m["parallel"]["tp"], m["parallel"]["ep"]
for r in range(tp):
    lead = [int(expert[1]) - r // (tp // ep) * tensor["lead"]] if tensor["lead"] else []
    at, start, count = cut["ranks"][r] if cut["axis"] != "none" else (0, 0, max(piece["rows"], tensor["whole_cols"]))
    i, j = (row, col - start + at) if cut["axis"] == "cols" else (row - start + at, col)
    if not start <= (col if cut["axis"] == "cols" else row) < start + count or lead and not 0 <= lead[0] < tensor["lead"]:
        continue
    i += piece["at"]
    parts = m["ranks"][tensor["stage"] * tp + r]["parts"]
    codes, scales = tensor["planes"]
    print(f"rank {tensor['stage'] * tp + r}:")
    show({f"{packed}/{p['file']}": header(f"{packed}/{p['file']}") for p in parts}, tensor["name"], tensor["name"] + scales["suffix"],
         lead + [i, j], lead + [i // scales["cell"][0], j // scales["cell"][1]])
