#!/usr/bin/env python3
"""minimax-verify proves every scale of every type: in a checkpoint of each scheme one scale of each plane becomes zero, negative, infinite or
NaN, digests put right, and is refused by E_SCALE; a negative one passes where the scheme has both signs."""
import hashlib
import json
import os
import shutil
import struct
import subprocess

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
BLOCK = 4 << 20
BAD = {"F32": {"zero": "00000000", "negative": "000080bf", "infinite": "0000807f", "NaN": "0000c07f"},
       "BF16": {"zero": "0000", "negative": "80bf", "infinite": "807f", "NaN": "c07f"},
       "F16": {"zero": "0000", "negative": "00bc", "infinite": "007c", "NaN": "007e"},
       "U32": {"zero": "00000000", "negative": "000080bf", "infinite": "0000807f", "NaN": "0000c07f", "more than a zero point": "0001803f"},
       "F8_E4M3": {"zero": "00", "negative": "b8", "NaN": "7f"}, "U8": {"NaN": "ff"}}
EITHER = ("int8", "w4a16", "w4afp8", "w4a16_f16", "w4a16_zero", "w8a16_zero")


def digest(b):
    return hashlib.sha256(b).hexdigest().encode()


def resealed(manifest, old, new):
    """The manifest after a part's bytes changed."""
    before, after = ([digest(b[i:i + BLOCK]) for i in range(0, len(b), BLOCK)] for b in (old, new))
    for x, y in [*zip(before, after), [digest(bytes.fromhex(b"".join(d).decode())) for d in (before, after)]]:
        assert x in manifest
        manifest = manifest.replace(x, y)
    body = manifest[:-78]
    return body + b'"sha256":"' + digest(body) + b'"\n}\n'


def verify(out):
    return subprocess.run([os.path.join(BIN, "minimax-verify"), out], capture_output=True, text=True, check=False)


tried = 0
for scheme in ("block_fp8", "tensor_wise_fp8", "channel_fp8", "mxfp8", "int8", "nvfp4", "nvfp4a16", "mxfp4", "w4a16", "w4afp8", "w4a8",
               "w4a16_f16", "w4a16_zero", "w8a16_zero"):
    out = os.path.join(TMP, scheme)
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([os.path.join(BIN, "minimax-convert"), "tests/data/tiny-m2", "-o", out, "--quiet", "--quant", scheme], check=True)
    with open(f"{out}/manifest.json", "rb") as f:
        manifest = f.read()
    t = next(t for t in json.loads(manifest)["tensors"] if t["scheme"] == scheme)
    for plane in t["planes"][1:]:
        name = t["name"] + plane["suffix"]
        for part in sorted(p for p in os.listdir(out) if p.endswith(".safetensors")):
            with open(f"{out}/{part}", "rb") as f:
                whole = f.read()
            n = struct.unpack("<Q", whole[:8])[0]
            header = json.loads(whole[8:8 + n])
            if name in header:
                break
        at = 8 + n + header[name]["data_offsets"][0]
        for what, code in BAD[plane["dtype"]].items():
            changed = bytearray(whole)
            changed[at:at + len(code) // 2] = bytes.fromhex(code)
            for path, b in ((part, changed), ("manifest.json", resealed(manifest, whole, bytes(changed)))):
                with open(f"{out}/{path}", "wb") as f:
                    f.write(b)
            done = verify(out)
            expected = 0 if what == "negative" and scheme in EITHER else 6
            assert done.returncode == expected, (scheme, name, what, done)
            assert expected == 0 or "E_SCALE" in done.stderr, (scheme, name, what, done.stderr)
            tried += 1
        for path, b in ((part, whole), ("manifest.json", manifest)):
            with open(f"{out}/{path}", "wb") as f:
                f.write(b)
    assert verify(out).returncode == 0
    shutil.rmtree(out)
print(f"{tried} scales in {len(BAD)} types judged")
