#!/usr/bin/env python3
"""The example at the end of formats/FORMAT.md is run as it stands there, on one expert matrix under every scheme: what it prints and
computes is the source matrix, exactly where nothing was quantised, else at the scheme's signal-to-noise ratio."""
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys

import numpy as np
from packed import Part

CONVERT = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")
SOURCE, EXPERT = "model.layers.0.block_sparse_moe.experts.{e}.w1.weight", 3
# Least SQNR in dB: a bit more is what each scheme reaches on this matrix.
LEAST = {"none": np.inf, "bf16": np.inf, "f16": 160, "f32": np.inf, "block_fp8": 31, "tensor_wise_fp8": 31, "channel_fp8": 31, "mxfp8": 31,
         "int8": 43, "w4a8": 19, "w4afp8": 20, "w4a16": 20, "mxfp4": 19, "nvfp4": 21.5, "nvfp4a16": 21.5,
         "w4a16_f16": 18, "w4a16_zero": 18, "w4a16_zero_bf16": 18, "w8a16_f16": 43, "w8a16_zero": 43, "w8a16_zero_bf16": 43}

with open("formats/FORMAT.md", encoding="utf-8") as f:
    (code,) = re.findall(r"```python\n(.*?)```", f.read(), re.S)
script = os.path.join(os.environ["TMPDIR"], "example.py")
with open(script, "w", encoding="utf-8") as f:
    f.write(code)
with open("quant/registry.c", encoding="utf-8") as f:
    schemes = ["none"] + re.findall(r"ROW\((\w+)\)", f.read())
assert schemes == sorted(LEAST, key=schemes.index), "a scheme without its least SQNR here"

part = next(p for p in (Part(f"tests/data/tiny-m1/model-0000{i}-of-00002.safetensors") for i in (1, 2))
            if SOURCE.replace("{e}", str(EXPERT)) in p.tensors)
want = (part.elements(SOURCE.replace("{e}", str(EXPERT))).astype("u4") << 16).view("<f4").astype("f8")
for quant in schemes:
    out = os.path.join(os.environ["TMPDIR"], quant)
    subprocess.run([CONVERT, "tests/data/tiny-m1", "-o", out, "--quant", quant, "--tp", "4", "--quiet"], check=True)
    sys.argv, printed = [script, out, SOURCE, str(EXPERT)], io.StringIO()
    with contextlib.redirect_stdout(printed):
        got = np.array(runpy.run_path(script)["W"])
    noise = ((got - want) ** 2).sum()
    sqnr = 10 * np.log10((want**2).sum() / noise) if noise else np.inf
    print(f"{quant}: {sqnr:.2f} dB")
    assert got.shape == want.shape and sqnr >= LEAST[quant], quant
    assert printed.getvalue().split()[:2] == [str(n) for n in want.shape]
print(f"the example of FORMAT.md reads {len(schemes)} schemes")
