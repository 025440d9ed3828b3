"""A reader of packed checkpoints written from formats/FORMAT.md alone: json, struct and byte offsets, no code of the project.

numpy holds the elements; every stored type is read as unsigned integers of its size, so that comparisons are of bits."""
import hashlib
import json
import os
import struct

import numpy as np

ELEMENT = {"BOOL": "u1", "U8": "u1", "I8": "u1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "F16": "<u2", "BF16": "<u2",
           "F32": "<u4", "I32": "<u4", "U32": "<u4", "I64": "<u8", "U64": "<u8", "F64": "<u8"}
BLOCK = 4 << 20


def cells(extent, cell):
    """Stored elements along an extent; a cell of 0 spans all of it."""
    return 1 if cell == 0 else -(-extent // cell)


class Part:
    """One part file: `tensors` maps a name to (dtype, shape, begin, end), offsets from the start of the file."""

    def __init__(self, path):
        with open(path, "rb") as f:
            self.bytes = f.read()
        (n,) = struct.unpack_from("<Q", self.bytes)
        self.data = 8 + n
        header = json.loads(self.bytes[8:self.data])
        self.metadata = header.pop("__metadata__", {})
        self.tensors = {name: (t["dtype"], t["shape"], self.data + t["data_offsets"][0], self.data + t["data_offsets"][1])
                        for name, t in header.items()}

    def elements(self, name):
        dtype, shape, begin, end = self.tensors[name]
        return np.frombuffer(self.bytes[begin:end], ELEMENT[dtype]).reshape(shape)

    def block_digests(self):
        return [hashlib.sha256(self.bytes[at:at + BLOCK]).digest() for at in range(0, len(self.bytes), BLOCK)]


class Packed:
    """A packed directory: its manifest and the parts of every rank."""

    def __init__(self, path):
        self.path = path
        with open(os.path.join(path, "manifest.json"), "rb") as f:
            text = f.read()
        self.manifest = json.loads(text)
        end = f'"sha256":"{hashlib.sha256(text[:-78]).hexdigest()}"\n}}\n'
        assert text[-78:].decode() == end, "the manifest's own digest"
        self.tp, self.ep, self.pp = (self.manifest["parallel"][key] for key in ("tp", "ep", "pp"))
        self.parts = [[Part(os.path.join(path, p["file"])) for p in rank["parts"]] for rank in self.manifest["ranks"]]

    def plane_shape(self, tensor, plane):
        if tensor["vector"]:
            return [tensor["rows"]]
        grid = [cells(tensor["rows"], plane["cell"][0]), cells(tensor["cols"], plane["cell"][1])]
        return [tensor["lead"]] + grid if tensor["lead"] else grid

    def stored(self, r, tensor, plane):
        """Stored elements of one plane on rank r of the tensor's stage, in its stored shape."""
        name = tensor["name"] + plane["suffix"]
        return next(part for part in self.parts[tensor["stage"] * self.tp + r] if name in part.tensors).elements(name)

    def spread(self, r, tensor, plane):
        """The plane on one rank with one element for each weight: [max(1, lead), rows, cols]."""
        rows, cols = tensor["rows"], tensor["cols"]
        n, k = (cell or extent for cell, extent in zip(plane["cell"], (rows, cols)))
        grid = self.stored(r, tensor, plane).reshape(tensor["lead"] or 1, cells(rows, n), cells(cols, k))
        grid = grid if n == 1 else np.repeat(grid, n, axis=1)[:, :rows]
        return grid if k == 1 else np.repeat(grid, k, axis=2)[:, :, :cols]

    def ranges(self, r, piece, cols):
        """Where a piece's own weights are on one rank: slices of its local rows and columns, and of its whole rows and columns."""
        cut = self.manifest["cuts"][piece["cut"]]
        every_row, every_col = slice(0, piece["local_rows"]), slice(0, cols)
        if cut["axis"] == "none":
            return (every_row, every_col), (every_row, every_col)
        at, start, count = cut["ranks"][r]
        here, there = slice(at, at + count), slice(start, start + count)
        return ((here, every_col), (there, every_col)) if cut["axis"] == "rows" else ((every_row, here), (every_row, there))

    def check_padding(self, r, tensor, plane):
        """Stored elements that cover none of the rank's own weights are zero."""
        rows, cols = tensor["rows"], tensor["cols"]
        n, k = (cell or extent for cell, extent in zip(plane["cell"], (rows, cols)))
        own = np.zeros((cells(rows, n), cells(cols, k)), bool)
        for piece in tensor["pieces"]:
            (local_rows, local_cols), _ = self.ranges(r, piece, cols)
            if local_rows.start == local_rows.stop or local_cols.start == local_cols.stop:
                continue
            first, last = piece["at"] + local_rows.start, piece["at"] + local_rows.stop - 1
            own[first // n:last // n + 1, local_cols.start // k:(local_cols.stop - 1) // k + 1] = True
        if own.all():
            return
        stored = self.stored(r, tensor, plane).reshape(tensor["lead"] or 1, *own.shape)
        assert not stored[:, ~own].any(), f"{tensor['name']}: padding that is not zero on rank {r}"

    def whole(self, tensor, plane):
        """Puts the ranks together: for each piece (source name, elements [max(1, whole_lead), rows, whole_cols]). Replicas must agree, every
        weight must be covered, and padding must be zero."""
        for r in range(self.tp):
            self.check_padding(r, tensor, plane)
        spread = [self.spread(r, tensor, plane) for r in range(self.tp)]
        for piece in tensor["pieces"]:
            out = np.zeros((tensor["whole_lead"] or 1, piece["rows"], tensor["whole_cols"]), spread[0].dtype)
            seen = np.zeros(out.shape, bool)
            for r in range(self.tp):
                here, there = self.ranges(r, piece, tensor["cols"])
                first = r // (self.tp // self.ep) * tensor["lead"]
                there = (slice(first, first + (tensor["lead"] or 1)), *there)
                block = spread[r][:, piece["at"]:piece["at"] + piece["local_rows"]][:, *here]
                old = seen[there]
                assert (out[there] == block)[old].all(), f"{tensor['name']}: replicas differ on rank {r}"
                out[there] = block
                seen[there] = True
            assert seen.all(), f"{tensor['name']}: ranks do not cover {piece['source']}"
            yield piece["source"], out
