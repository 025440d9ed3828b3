#!/usr/bin/env python3
"""What the programs write and say is what it was: every byte of some sixty checkpoints, archives and reports, and the lines and exit statuses of
two hundred commands, half of them refusals, are those of tests/data/unchanged.json. It shows that something changed, not that it is right: what
is right, other tests say. After a change that is meant: tests/cli/unchanged.py --write, and read the difference."""
import hashlib
import json
import os
import re
import shlex
import struct
import subprocess
import sys

from convert_files import INDEX, Scratch, noise, small, tree, write_st

TINY = {"m1": "tests/data/tiny-m1", "m2": "tests/data/tiny-m2"}
EXPECTED = "tests/data/unchanged.json"
SCHEMES = "none bf16 f16 f32 block_fp8 channel_fp8 tensor_wise_fp8 mxfp8 int8 nvfp4 nvfp4a16 w4afp8 w4a16 w4a8 mxfp4".split()
# What hangs on the machine and the day.
VARIES = [(r"\d+\.\d+ s\b", "T s"), (r"\d+\.\d+ GB/s", "R GB/s"), (r"peak RSS \d+ MiB", "peak RSS"), (r"<dd>20[-0-9: ]+UTC", "DATE"),
          (r'("(?:\w*seconds|\w*per_s|peak_rss_bytes)"): ?[-0-9.e]+', r"\1: V"), (r"in \d\.\d+ GB \(\d+\.\d+ %\)", "in Z"),
          (r"-?\d+\.\d{7,}(?:e-?\d+)?", lambda m: f"{float(m[0]):.6g}"),  # logarithms are the C library's
          (r"(?m)^[a-z ]*\[#*-*\] .*\n", "")]  # progress, which a log gets every five seconds

MAKE = """
minimax-convert m1 -o m1-tp4 --quant nvfp4 --tp 4
minimax-convert m1 -o m1-parallel --quant fp8_attention_int4_experts --tp 2 --ep 2 --pp 2
minimax-convert m1 -o m1-four --quant nvfp4 --search four_six --part-size 1M
minimax-convert m1 -o m1-absmax --quant int8 --search absmax --head block_fp8
minimax-convert m2 -o m2-recipe --recipe recipe.json --tp 2
minimax-convert m2 -o m2-pad --quant block_fp8 --tp 2 --tp-align pad
minimax-convert m2 -o m2-tp8 --quant block_fp8 --tp 8
minimax-convert m2 -o m2-weighed --quant nvfp4 --importance moments.safetensors --act-scales moments.safetensors
minimax-convert m2 -o m2-static --quant tensor_wise_fp8 --act-scales moments.safetensors --layout hf
minimax-convert m2 -o m2-archive --quant w4a16 --compress zstd
minimax-convert m2 -o m2-ranks --quant block_fp8 --tp 4 --ranks 1,3
minimax-convert odd -o odd-tp2 --quant nvfp4 --tp 2 --allow-nonfinite
minimax-convert odd -o odd-int4 --quant experts_int4 --tp 2 --pp 2 --allow-nonfinite
minimax-convert odd8 -o odd8-none --tp 2
minimax-convert odd8 -o odd8-mx --quant mxfp4 --tp-align pad --tp 2
minimax-convert m2 -o hf-fp8 --layout hf --quant block_fp8
minimax-convert m2 -o hf-ct --layout hf --quant channel_fp8 --part-size 1M
minimax-convert m2 -o hf-nvfp4 --layout hf --quant nvfp4a16 --dialect modelopt
minimax-convert m2 -o hf-mixed --layout hf --quant fp8_attention_nvfp4_experts
minimax-convert m2 -o hf-mx --layout hf --quant mxfp8
minimax-convert m1 -o hf-int8 --layout hf --quant int8
minimax-convert m1 -o hf-int4 --layout hf --quant w4a16 --ignore '*gate*' --override '*.layers.1.*experts*=int8'
minimax-convert m2-block_fp8 -o again-tp4 --tp 4
minimax-convert m2-nvfp4a16 -o again-hf --layout hf
minimax-convert hf-nvfp4 -o from-modelopt --tp 2
minimax-convert hf-mixed -o from-mixed
minimax-archive pack m2-nvfp4 -o packed
minimax-archive unpack packed -o unpacked
"""
LOOK = """
minimax-convert m2 -o x --dry-run --json --tp 4 --quant nvfp4 --gpu-memory 100M
minimax-convert m1 -o x --dry-run --tp 8 --quant mxfp4 --gpu-memory 1M
minimax-convert m2 -o x --dry-run --names-only --layout hf --quant int8
minimax-convert m2 --print-recipe --quant fp8_attention_nvfp4_experts --ignore lm_head* --search absmax
minimax-convert --quant help
minimax-convert --quant help --json
minimax-inspect m2-nvfp4
minimax-inspect m2-nvfp4 --json
minimax-inspect m1-parallel --rank 3
minimax-inspect m1-parallel --rank 1 --json --match experts
minimax-inspect m1-parallel --summary
minimax-inspect hf-mixed --json
minimax-inspect m1
minimax-inspect m2 --json --match layers.0.
minimax-inspect m2 --names-only
minimax-inspect m2-recipe/model-rank-00001-part-00000.safetensors --json
minimax-inspect m2-nvfp4 --diff m2-block_fp8
minimax-inspect m2-nvfp4 --diff m2-weighed --data --json
minimax-inspect m2 --diff m2 --data --json
minimax-inspect m2-block_fp8 --diff m2
minimax-verify unpacked
minimax-verify m2-archive
minimax-verify m2-mxfp4 --level header --json
minimax-verify m2-w4a8 --level sample --samples 2 --seed 5
minimax-verify m1-parallel --source m1 --list
minimax-verify m1-tp4 --source m1 --report r-m1.json --min-sqnr 15
minimax-verify m1-tp4 --source m1 --report r-m1.csv --json
minimax-verify m1-tp4 --source m1 --report r-m1.html
minimax-verify m2-recipe --source m2 --report r-m2.html -q
minimax-verify m2-none --source m2 --report r-none.html -q
minimax-verify hf-mixed --source m2 --report r-hf.json
minimax-verify hf-int8 --source m1 --report r-hf.html --list
minimax-verify odd-tp2 --source odd --report r-odd.csv
minimax-verify again-tp4 --source m2
minimax-verify m2-tp8 --source m2 --json
minimax-verify m2-static --json
"""
REFUSE = """
minimax-convert m2
minimax-convert m2 -o m2-nvfp4
minimax-convert m2 -o m2-nvfp4 --tp 2 --resume
minimax-convert m2 -o y --tp 3
minimax-convert m2 -o y --tp 0
minimax-convert m2 -o y --tp 8 --tp-align error --quant block_fp8
minimax-convert m2 -o y --ep 2
minimax-convert m2 -o y --pp 9
minimax-convert m2 -o y --ranks 4 --tp 4
minimax-convert m2 -o y --ranks 2-1 --tp 4
minimax-convert m2 -o y --part 3/3
minimax-convert m2 -o y --quant fp8
minimax-convert m2 -o y --quant nope
minimax-convert m2 -o y --quant 'nvfp4; search=best'
minimax-convert m2 -o y --quant 'nvfp4; *.nothing.*=int8'
minimax-convert m2 -o y --quant 'nvfp4; re:(a=int8'
minimax-convert m2 -o y --override '*norm*=int8'
minimax-convert m2 -o y --ignore lm_haed
minimax-convert m2 -o y --recipe bad.json
minimax-convert m2 -o y --recipe cut.json
minimax-convert m2 -o y --recipe absent.json
minimax-convert m2 -o y --recipe recipe.json --quant int8
minimax-convert m2 -o y --bogus
minimax-convert m2 -o y --jobs x
minimax-convert m2 -o y --resume --restart
minimax-convert m2 -o y --mem-limit 1K --jobs 2
minimax-convert m2 -o y --layout hf --tp 2
minimax-convert m2 -o y --layout hf --quant w4a8
minimax-convert m2 -o y --layout hf --quant nvfp4
minimax-convert m2 -o y --layout hf --quant mxfp4 --dialect fp8
minimax-convert m2 -o y --layout hf --dialect none
minimax-convert m2 -o y --importance bad.json --quant nvfp4
minimax-convert m2 -o y --importance moments.safetensors
minimax-convert m1 -o y --act-scales moments.safetensors --quant nvfp4
minimax-convert m2 -o y --act-scales bad.json --quant nvfp4
minimax-convert m2-ranks -o y
minimax-convert m2-nvfp4 -o m2-nvfp4/y
minimax-convert odd -o y --quant nvfp4
minimax-convert absent -o y
minimax-convert org/name -o y
minimax-convert packed -o y
minimax-archive
minimax-archive eat m2-nvfp4
minimax-archive list m2-nvfp4
minimax-archive pack m2-nvfp4
minimax-archive pack m2-none -o packed
minimax-archive pack m2 -o y
minimax-archive unpack m2-nvfp4 -o y
minimax-archive sign m2-nvfp4 --key absent.pem
minimax-inspect
minimax-inspect absent
minimax-inspect recipe.json
minimax-inspect m2-nvfp4 --rank 1
minimax-inspect m2-nvfp4 --data
minimax-inspect m2-nvfp4 --diff m2 --match x
minimax-verify m2
minimax-verify absent
minimax-verify packed --source m2
minimax-verify m2-nvfp4 --level most
minimax-verify m2-nvfp4 --min-sqnr x
minimax-verify m2-nvfp4 --min-sqnr 20
minimax-verify m2-nvfp4 --source m1
minimax-verify m2-nvfp4 --source m2 --min-sqnr 60
minimax-verify m2-nvfp4 --source m2 --report r.txt
minimax-verify m2-nvfp4 --source m2 --report m2-nvfp4/r.json
minimax-verify damaged
minimax-verify damaged --json
minimax-eval m2-nvfp4
minimax-eval m2-nvfp4 --ids bad.json
minimax-eval m2-nvfp4 --ids absent.json
minimax-eval m2-nvfp4 --ids ids.json --window 400
minimax-eval m2-nvfp4 --ids ids.json --logits l
minimax-run m2-nvfp4
minimax-run m2 -p x
minimax-run absent -p x
minimax-run m2-nvfp4 -p x --temperature -1
minimax-run m2-nvfp4 -p x --top-p 2
minimax-run m2-nvfp4 -p x --device tpu
minimax-run m2-nvfp4 -p x --max-model-len 1
minimax-serve m2 --check
minimax-serve m2-nvfp4 --check --max-body 8G
minimax-serve m2-nvfp4 --check --max-model-len 90000000
minimax-serve m2-nvfp4 --check --config bad.json
minimax-hold m2-nvfp4 sock --device cpu
minimax-bench all
"""


def changed(config, index):
    """What a source may have wrong: a file, and its text."""
    c, i = json.loads(config), json.loads(index)

    def having(**keys):
        return json.dumps({**c, **keys}).encode()
    lost = next(k for k in i["weight_map"] if k.endswith("_scale_inv"))
    without = {k: v for k, v in i["weight_map"].items() if k != lost}
    return {
        "empty": b"", "cut": config[:100].encode(), "nul": config.encode() + b"\0", "twice": b'{"hidden_size": 1,' + config[1:].encode(), "list": b"[1]",
        "deep": b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", "nan": b'{"a": NaN}', "lone": b'{"a": "\\ud800"}', "big": having(hidden_size=2**70),
        "real": having(hidden_size=1.5), "text": having(hidden_size="256"), "type": having(architectures=["X"], model_type="minimax_m3"),
        "layers": having(num_hidden_layers=7), "heads": having(num_attention_heads=-1), "vocab": having(vocab_size=17), "top": having(num_experts_per_tok=9),
        "awq": having(quantization_config={"quant_method": "awq", "bits": 4}), "method": having(quantization_config={"quant_method": "nonsense"}),
        "rotated": having(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], "rotate": True}),
        "block": having(quantization_config={"quant_method": "fp8", "weight_block_size": [128]}), "attention": having(attn_type_list=[0, 1, 1, 1]),
        "index": b"{}", "index-cut": index[:200].encode(), "index-path": index.replace("model-00001-of-00002", "../x", 1).encode(),
        "index-file": index.replace("model-00001-of-00002", "model-00003-of-00002", 1).encode(), "index-scale": json.dumps({**i, "weight_map": without}).encode(),
    }


def sources(root):
    """The commands' inputs, the same in every run."""
    for name, path in TINY.items():
        os.symlink(os.path.abspath(path), f"{root}/{name}")
    odd = small(hidden=144, heads=4, kv=2, dim=40, experts=4, inter=96, vocab=37, layers=2, fp8=False)
    dtype, shape, data = odd.tensors["model.layers.1.self_attn.o_proj.weight"]
    odd.tensors["model.layers.1.self_attn.o_proj.weight"] = (dtype, shape, data[:6] + b"\x80\x7f" + data[8:])  # infinite
    odd.save(root + "/odd")
    small(hidden=192, heads=4, kv=2, dim=48, experts=2, inter=144, vocab=40, layers=1, block=64).save(root + "/odd8")
    config, index = (open(f"{TINY['m2']}/{n}", encoding="utf-8").read() for n in ("config.json", INDEX))
    for name, text in changed(config, index).items():
        os.mkdir(f"{root}/bad-{name}")
        for file in os.listdir(TINY["m2"]):
            os.symlink(os.path.abspath(f"{TINY['m2']}/{file}"), f"{root}/bad-{name}/{file}")
        file = f"{root}/bad-{name}/{INDEX if name.startswith('index') else 'config.json'}"
        os.unlink(file)
        with open(file, "wb") as f:
            f.write(text)
    for name, text in {"recipe.json": {"default": "nvfp4a16", "search": "mse", "rules": [{"match": "*self_attn.*_proj*", "scheme": "block_fp8"}, {"match": "re:.*layers[.]0[.].*w2.*", "scheme": "int8"}]},
                       "bad.json": {"default": 7}, "ids.json": [1 + i * 7 % 50 for i in range(300)]}.items():
        with open(f"{root}/{name}", "w", encoding="utf-8") as f:
            json.dump(text, f)
    open(f"{root}/cut.json", "w", encoding="utf-8").write('{"default"')
    write_st(f"{root}/moments.safetensors", moments())


def moments():
    """Importance and largest magnitudes for every packed matrix of tiny-m2."""
    out = {}
    for layer in range(4):
        for name, cols, experts in (("self_attn.qkv_proj.weight", 256, 0), ("self_attn.o_proj.weight", 512, 0), ("block_sparse_moe.experts.w13_weight", 256, 8),
                                    ("block_sparse_moe.experts.w2_weight", 192, 8)):
            name, n = f"model.layers.{layer}.{name}", max(experts, 1)
            squares = [0.01 + b / 100 for b in noise(name, n * cols)]
            out[name + ".mean_square"] = ("F32", [n, cols] if experts else [cols], struct.pack(f"<{n * cols}f", *squares))
            out[name + ".rows"] = ("I64", [n], struct.pack(f"<{n}q", *(16 + 16 * (e % 5) for e in range(n))))
            out[name + ".amax"] = ("F32", [n], struct.pack(f"<{n}f", *(1 + b / 32 for b in noise(name + "a", n))))
    return out


def said(text, most=400):
    for pattern, to in VARIES:
        text = re.sub(pattern, to, text)
    return text if len(text) < most else "sha256 " + hashlib.sha256(text.encode()).hexdigest()


def test_progress():
    """A busy machine is slow enough for lines of progress; they are no part of the text."""
    lines = ("[#############################-] 0.01 of 0.01 GB (100 %), 0.00 GB/s, 0 s left, model.norm.weight\n", "checking numbers [------------------------------] 0 %\n")
    for line in lines:
        assert said(f"a [b] plan\n{line}done\n") == said("a [b] plan\ndone\n"), line


def damage(root):
    """A checkpoint with one bit of a part flipped."""
    subprocess.run(["cp", "-r", root + "/m2-nvfp4", root + "/damaged"], check=True)
    with open(root + "/damaged/model-rank-00000-part-00000.safetensors", "r+b") as f:
        f.seek(1000000)
        byte = f.read(1)[0]
        f.seek(1000000)
        f.write(bytes([byte ^ 4]))


def look(root):
    bin_ = os.path.join(os.environ["BUILD"], "bin")
    commands = [f"minimax-convert m2 -o m2-{s} --quant {s}" for s in SCHEMES] + MAKE.split("\n") + LOOK.split("\n") + ["damage"] + REFUSE.split("\n")
    commands += [f"minimax-convert {n} -o y --dry-run --allow-outside-links{j}" for n in sorted(os.listdir(root)) if n.startswith("bad-") for j in ("", " --json")]
    found = {}
    for c in filter(None, commands):
        if c == "damage":
            damage(root)
            continue
        p = subprocess.run([f"{bin_}/{shlex.split(c)[0]}", *shlex.split(c)[1:]], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                           errors="backslashreplace", timeout=120, check=False, env={**os.environ, "HF_HUB_CACHE": "/hub"})
        found[c] = [p.returncode, said(p.stdout), said(p.stderr)]
    for path, (_, what) in sorted(tree(root).items()):
        if re.match(r"(m1|m2|odd8?|hf|again|from|un)[-p].*/", path) and not path.startswith("m2-archive"):  # frames are zstd's
            found[path] = what
        elif path.startswith("r-"):
            found[path] = said(open(f"{root}/{path}", encoding="utf-8").read(), 0)
    return found


def main():
    test_progress()
    with Scratch() as root:
        sources(root)
        found = look(root)
    if sys.argv[1:] == ["--write"]:
        with open(EXPECTED, "w", encoding="utf-8") as f:
            json.dump(found, f, indent=0, ensure_ascii=False)
        return print(f"{len(found)} written")
    expected = json.load(open(EXPECTED, encoding="utf-8"))
    wrong = [k for k in {**expected, **found} if expected.get(k) != found.get(k)]
    for k in wrong[:20]:
        print(f"{k}\n  was {expected.get(k)}\n  is  {found.get(k)}")
    print(f"{len(found) - len(wrong)} of {len(found)} commands and files as they were")
    return bool(wrong)


sys.exit(main())
