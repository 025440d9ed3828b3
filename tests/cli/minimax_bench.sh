#!/bin/sh
# minimax-bench where there is no GPU: what it refuses, in one line by name, and small shapes on the CPU.
set -eu
# refused STATUS CODE ARGUMENT…
refused() {
  status=$1 code=$2
  shift 2
  found=0
  "$BUILD/bin/minimax-bench" "$@" >"$TMPDIR/out" 2>"$TMPDIR/err" || found=$?
  [ "$found" -eq "$status" ] && [ "$(wc -l <"$TMPDIR/err")" -eq 1 ] && grep -q "^minimax-bench: error: $code: " "$TMPDIR/err" ||
    { echo "$*: status $found"; cat "$TMPDIR/err"; exit 1; }
}
refused 2 E_USAGE
refused 2 E_USAGE everything
refused 2 E_USAGE layers decode
refused 2 E_USAGE layers --model m4
refused 2 E_USAGE layers --quant int3
refused 2 E_USAGE layers --head int3
refused 2 E_USAGE layers --vocab 200065
refused 2 E_USAGE layers --batch 4097
refused 2 E_USAGE choices --quant int3
refused 2 E_USAGE prefill --ep 0
refused 2 E_USAGE prefill --ep 2
refused 2 E_USAGE prefill --tp 4 --ep 3
refused 2 E_USAGE drafts --device cpu --shrink 32 --layers 1
refused 2 E_USAGE drafts --device cpu --model m3
refused 2 E_USAGE drafts --device cpu --draft-quant nvfp4
refused 2 E_USAGE choices --tp 2 --ep 4
grep -qx 'minimax-bench: error: E_USAGE: found --ep 4, expected a divisor of --tp 2.*' "$TMPDIR/err"
# The table of kernels needs no GPU. runtime/cuda/README.md has M2's as it is printed.
bench=$BUILD/bin/minimax-bench
"$bench" choices --model m2 >"$TMPDIR/table"
sed -n '/^\$ minimax-bench choices --model m2$/,/^```$/p' runtime/cuda/README.md | sed '1d;$d' | diff - "$TMPDIR/table"
"$bench" choices --model m1 --quant block_fp8 --act-quant off | grep -q '^  1 to 3 *experts_up, experts_down$'
# Cut, out's inputs have scales of all ranks' columns, and are rounded before their product.
"$bench" choices --model m2 --quant nvfp4 --expert-quant w4a16 --head bf16 --tp 8 >"$TMPDIR/cut"
grep -c '^m2, .*: ' "$TMPDIR/cut" | grep -qx 8
grep -qx '  1            round_rows, one' "$TMPDIR/cut"
# An eighth of an expert's columns has scales too fine for the product of codes; whole experts take it.
"$bench" choices --model m2 --quant block_fp8 --tp 8 >"$TMPDIR/cut"
"$bench" choices --model m2 --quant block_fp8 --tp 8 --ep 8 >"$TMPDIR/whole"
[ "$(grep -c '^  65 and more *encode, spread, product' "$TMPDIR/cut")" -eq 0 ]
grep -q '^  65 and more *encode, spread, product' "$TMPDIR/whole"
"$bench" choices --json | python3 -c '
import json, sys
rows = [json.loads(line) for line in sys.stdin]
assert {r["code"] for r in rows} == {"sm_90a", "other code"} and {r["model"] for r in rows} == {"m1", "m2", "m3"}
for r in rows:
    assert r["kernels"] and r["schemes"] and r["products"] and r["step"] in ("any", "decode", "prefill") and r["from"] <= r.get("to", 1 << 30), r
head = [r for r in rows if r["model"] == "m2" and r["code"] == "sm_90a" and r["products"] == ["head"] and r["schemes"] == ["bf16"]]
assert [(r["from"], r.get("to"), r["step"]) for r in head] == [
    (1, 1, "any"), (2, 16, "any"), (17, 64, "decode"), (17, 64, "prefill"), (65, None, "any")], head
'
# The attention of a prompt of two chunks, of a sparse and a full layer: 210 tokens, all of them in chosen blocks.
"$bench" attention --device cpu --model m3 --shrink 64 --context 210 --tokens 128 --threads 1 --json | python3 -c '
import json, sys
r = [json.loads(line) for line in sys.stdin][-1]
assert r["context"] == 210 and "chosen_blocks_s" in r and r["full_s"] > 0 and r["chosen_blocks_ops"] == r["full_ops"] == 180634000, r
'
"$bench" attention --device cpu --model m3 --shrink 64 --layers 1 >"$TMPDIR/one" 2>&1 && exit 1
grep -q "expected both kinds" "$TMPDIR/one"
# Steps that a draft proposes for, of 8, 4 and 2 rows: tokens of the published lengths, over the time of the step and of the draft's pass.
"$bench" drafts --device cpu --tp 2 --shrink 32 --layers 2 --vocab 2048 --batch 2 --context 40 --steps 5 --threads 1 --json | python3 -c '
import json, sys
rows = [json.loads(line) for line in sys.stdin][1:]
assert [r["rows"] for r in rows] == [8, 4, 2], rows
for r in rows:
    assert r["seconds"] > r["draft_s"] > 0 and 0 < r["plain_s"] and r["experts_a_layer"] == 8 and r["batch"] == 2, r
    for d in r["drafted"]:
        assert abs(d["of_plain"] - d["tokens_a_step"] * r["plain_s"] / r["seconds"]) < 1e-3 * d["of_plain"] + 1e-4, (r, d)
        assert 1 < d["tokens_a_step"] <= min(d["length"], r["rows"]) + 1e-3, d
assert [d["tokens_a_step"] for d in rows[0]["drafted"]] == [3.9, 2.6], rows[0]
assert [round(d["tokens_a_step"], 2) for d in rows[2]["drafted"]] == [1.78, 1.62], rows[2]
assert all(r["draft_quant"] == "bf16" and r["draft_bytes"] == 5 * 172032 * 2 + 196608 for r in rows), rows
'
# Its matrices in E4M3: as many codes, a scale for 128 x 128 of them, and the rank's half of the head.
"$bench" drafts --draft-quant block_fp8 --device cpu --tp 2 --shrink 32 --layers 2 --vocab 2048 --batch 2 --verify 8 --context 40 --steps 5 --threads 1 --json | python3 -c '
import json, sys
rows = [json.loads(line) for line in sys.stdin][1:]
assert [(r["rows"], r["draft_quant"], r["draft_bytes"]) for r in rows] == [(8, "block_fp8", 5 * (172032 + 56) + 196608)], rows
assert rows[0]["draft_floor_s"] > 0, rows
'
"$bench" drafts --draft eagle3 --device cpu --tp 2 --shrink 32 --layers 2 --vocab 2048 --batch 2 --context 40 --steps 5 --threads 1 --json | python3 -c '
import json, sys
rows = [json.loads(line) for line in sys.stdin][1:]
assert [r["rows"] for r in rows] == [8, 4, 2] and all(r["seconds"] > r["draft_s"] > 0 for r in rows), rows
assert [d["tokens_a_step"] for d in rows[1]["drafted"]] == [2.94, 2.6], rows[1]
'
# On the CPU, narrow shapes of M3: a dense and a sparse layer, a context that is filled in pieces; the bytes that each must move.
"$bench" kernels --device cpu --model m3 --shrink 64 --layers 2 --vocab 2048 --batch 1 --context 2200 --steps 5 --threads 1 --json >"$TMPDIR/ops"
python3 - "$TMPDIR/ops" <<'END'
import json, sys
at = {r.get("op"): r for r in map(json.loads, open(sys.argv[1]))}
chosen, selection = at["norm, RoPE, cache write, attention over chosen blocks"], at["index norms, RoPE, key write, selection of blocks"]
assert {"dense MLP", "shared expert", "index projections", "router", "norm, RoPE, cache write, attention"} <= set(at), set(at)
# f32 caches of one head of 128: 15 blocks of 128 and the position's own, 2200 % 128 before it; keys of the index at all positions.
blocks = 2 * (15 * 128 + 2200 % 128 + 1) * 128 * 4
assert chosen["bytes"] == blocks and selection["bytes"] == 2200 * 128 * 4, (chosen, selection)
heads, hidden, experts, index = 16 * 128, 96, 4, 128
matrix = lambda n, k: n * (k + -(-k // 32))  # mxfp8: a byte of scale for each 32 columns
both = 2 * (matrix(heads + 256, hidden) + matrix(hidden, heads)) + 2 * 2200 * 128 * 4 + blocks + 2200 * 128 * 4
dense = matrix(2 * 192, hidden) + matrix(hidden, 192)
expert = matrix(96, hidden) + matrix(hidden, 48)
layer = at["a layer in its step"]
sparse = 2 * 2 * index * hidden + 4 * hidden * experts + expert + layer["experts_a_layer"] * expert
assert abs(layer["bytes"] - (both + dense + sparse) / 2) <= 1, (layer, (both + dense + sparse) / 2)
END
[ ! -e /dev/nvidiactl ] || { echo "options refused; a GPU is there"; exit 0; }
for subject in kernels layers decode drafts prefill mixed; do
  refused "$(grep -qa cudaGetDevice "$BUILD/bin/minimax-bench" && echo 5 || echo 4)" E_CUDA $subject
done
[ ! -s "$TMPDIR/out" ]
echo "refused by name without a GPU"
