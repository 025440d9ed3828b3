#!/bin/sh
# scripts/layers.sh, rooms.py, words.py and limits.py find every kind of violation, one at a time, and find nothing wrong in a tree that has none.
set -eu
mkdir -p "$TMPDIR/scripts"
cp scripts/layers.sh scripts/rooms.py scripts/words.py "$TMPDIR/scripts"
sed '/^        "/d' scripts/limits.py >"$TMPDIR/scripts/limits.py" # without its exceptions
chmod +x "$TMPDIR/scripts/limits.py"
cd "$TMPDIR"

# put FILE LINE: a tree of clean files, plus FILE with LINE.
put() {
  rm -rf formats quant loader convert runtime tests other
  mkdir -p formats/system quant loader convert/model convert/source convert/plan convert/write runtime/cpu runtime/cuda/moe tests other
  printf '#include "formats/json.h"\n' >formats/json.c
  printf '#include <openssl/evp.h>\n' >formats/hash.c
  printf '#include <zstd.h>\n' >formats/frame.c
  printf '#include "formats/json.h"\n#include "quant/quant.h"\n' >quant/plain.c
  printf '#include "quant/quant.h"\n#include "loader/bind.h"\n' >loader/bind.c
  printf '#include "loader/bind.h"\n' >convert/plan/plan.c
  printf '#include "runtime/engine/ops.h"\n#include "loader/bind.h"\n' >runtime/cpu/linear.c
  printf '#include <cuda_runtime.h>\n#include "runtime/engine/ops.h"\n' >runtime/cuda/linear.cu
  printf '#include "runtime/engine/engine.h"\n#include "convert/plan/plan.h"\n' >convert/minimax_convert.c
  printf '#include "runtime/engine/engine.h"\n#include "runtime/constrain/grammar.h"\n' >tests/test_all.c
  [ -z "$1" ] || { mkdir -p "$(dirname "$1")" && printf '%b\n' "$2" >>"$1"; }
}
count=0
refuse() {
  put "$1" "$2"
  if scripts/layers.sh >all; then echo "not found: $1: $2"; exit 1; fi
  grep -v '^modules that include each other' all >found || true # some close a circle, too
  [ "$(wc -l <found)" -eq 1 ] && grep -q "^$1:[0-9]*: " found || { echo "for $1: $2:"; cat found; exit 1; }
  count=$((count + 1))
}

put '' ''
scripts/layers.sh
refuse formats/json.c '#include "quant/quant.h"'
refuse quant/plain.c '#include "loader/bind.h"'
refuse quant/plain.c '#include "runtime/engine/ops.h"'
refuse loader/bind.c '#include "convert/plan/plan.h"'
refuse convert/plan/plan.c '#include "runtime/engine/engine.h"'
refuse runtime/cpu/linear.c '  #  include "convert/plan/plan.h"'
refuse runtime/cpu/linear.c '#include "runtime/cuda/stream.h"'
refuse loader/bind.c '#include "bind.h"'
refuse loader/bind.c '#include <openssl/sha.h>'
refuse formats/system/file.c '#include <zstd.h>'
refuse runtime/engine/engine.c '#include <cuda_runtime.h>'
refuse runtime/engine/engine.c '#include <cublas_v2.h>'
refuse runtime/engine/engine.c '#include <nccl.h>'
refuse runtime/engine/engine.c '#include <mpi.h>'
refuse loader/bind.c '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>'
refuse other/thing.c '/* in no layer */'
refuse convert/source/hf.c '#include "convert/plan/plan.h"'
refuse convert/model/rule.h '#include "convert/source/hf.h"'
refuse convert/plan/layout.c '#include "convert/write/writer.h"'
refuse formats/system/pool.c '#include "formats/json.h"'
refuse loader/bind.c '#include "loader/stream/reader.h"'
refuse loader/stream/reader.c '#include "loader/archive/archive.h"'
refuse runtime/engine/forward.c '#include "runtime/cpu/cpu_backend.h"'
refuse runtime/engine/forward.c '#include "runtime/bench/bench_cases.h"'
refuse runtime/text/bpe.c '#include "runtime/chat/reply.h"'
refuse runtime/chat/reply_m1.c '#include "runtime/serve/body.h"'
refuse runtime/schedule/reuse.c '#include "runtime/text/bpe.h"'
refuse runtime/constrain/schema_compile.c '#include "runtime/serve/call.h"'
refuse runtime/serve/turn.c '#include "runtime/constrain/grammar.h"'
refuse runtime/minimax_serve.c '#include "runtime/constrain/schema.h"'
refuse runtime/cuda/dispatch/print_dispatch.c '#include "runtime/cuda/core/device.cuh"'
refuse runtime/cuda/core/rows.cu '#include "runtime/cuda/comm/peers.h"'
refuse runtime/cuda/comm/peers.cu '#include "runtime/cuda/gemm/inputs.h"'
refuse runtime/cuda/gemm/gemm.cu '#include "runtime/cuda/attention/gqa.h"'
refuse runtime/cuda/sampling/sample_rows.cu '#include "runtime/cuda/backend.h"'
refuse runtime/cuda/backend.cu '#include "runtime/cuda/moe/route.cuh"'
refuse runtime/attic/thing.c '/* in no folder of the table */'
refuse convert/attic/thing.c '/* in no folder of the table */'
put '' ''
seq -f '/* %g */' 1400 | tee convert/plan/cut.c >convert/plan/planner.c
if scripts/layers.sh >found; then echo "not found: a folder of 2,801 lines"; exit 1; fi
[ "$(cat found)" = 'convert/plan: has 2801 lines, more than 2800' ] || { cat found; exit 1; }
sed -i 1d convert/plan/cut.c
scripts/layers.sh
count=$((count + 1))
put formats/json.h '#include "formats/file.h"'
printf '#include "formats/json.h"\n' >formats/file.c
if scripts/layers.sh >found; then echo "not found: a circle of two modules"; exit 1; fi
grep -q '^modules that include each other: formats/file formats/json $' found || { cat found; exit 1; }
count=$((count + 1))

# finds SCRIPT TEXT: it fails, and its one line holds TEXT.
finds() {
  git add -A .
  if "scripts/$1" >found; then echo "$1 does not find: $2"; exit 1; fi
  [ "$(wc -l <found)" -eq 1 ] && grep -qF "$2" found || { echo "$1: expected $2"; cat found; exit 1; }
  count=$((count + 1))
}

git init -q .
put '' ''
git add -A .
scripts/rooms.py | grep -q '^7 rooms, 4 levels, 6 arrows, no circle'
put formats/system/file.c '#include "formats/json.h"'
printf '#include "formats/system/file.h"\n' >>formats/json.c
finds rooms.py 'rooms that include each other: formats'
put '' ''
for i in $(seq 17); do mkdir -p "runtime/r$i" && echo '#include "loader/bind.h"' >"runtime/r$i/n$i.c"; done
finds rooms.py '24 rooms, '
put '' ''
for i in $(seq 7); do mkdir -p "runtime/r$i" && printf '#include "runtime/r%s/n.h"\n' $((i - 1)) >"runtime/r$i/n$i.c"; done
sed -i 's|runtime/r0/n.h|loader/bind.h|' runtime/r1/n1.c
scripts/rooms.py --list >/dev/null
mkdir -p runtime/r8 && printf '#include "runtime/r7/n.h"\n' >runtime/r8/n8.c
finds rooms.py ' 11 levels, '
put '' ''
git add -A .
scripts/words.py
put loader/bind.h '/* Binds names.\n * A rank that waits in vain gives up. */'
finds words.py 'loader/bind.h:2: a comment says "in vain"'
put '' ''
printf '# Names\n\nA `--dialect` is an option.\nNothing is in vain here.\n' >names.md && git add -A .
finds words.py 'names.md:4: a page says "in vain"'
printf '# Names\n\nWhat binds names.\n' >names.md
finds words.py 'names.md: a sentence begins with What: What binds names.'
rm names.md && git add -A .
put loader/bind.h 'void mm_rows_apart(void);'
finds words.py 'loader/bind.h:1: a name is mm_rows_apart'
put loader/bind.h 'typedef struct mm_row {\n  int n;\n} mm_row;'
printf 'struct mm_row {\n  int k;\n};\n' >runtime/cpu/row.h
finds words.py 'runtime/cpu/row.h:1: type mm_row is defined in loader/bind.h too'
put loader/bind.h '/* What binds names. */'
finds words.py 'loader/bind.h:1: a sentence begins with What: What binds names.'
put loader/bind.h 'static const char *const text = "found twins";'
finds words.py 'loader/bind.h:1: a text says "twins"'
put loader/bind.h "$(seq -f '/* Name %g is bound. */' 49)\n/* That binds names. */"
git add -A .
scripts/words.py
put '' ''
[ "$(scripts/limits.py)" = "0 over 40 fields, 0 over 60 lines, 0 over 8 parameters" ]
put loader/bind.h "struct mm_row { $(seq -s ' ' -f 'int a%g; /* { */' 40) bool (*f)(int, int); };"
finds limits.py 'loader/bind.h:mm_row: 41 fields, at most 40'
put runtime/cpu/row.c "extern \"C\" {\nvoid mm_rows(int a, int b) {\n$(seq -s '\n' -f '  { puts("}%g"); }' 60)\n}\n}"
finds limits.py 'runtime/cpu/row.c:mm_rows: 62 lines, at most 60'
put loader/bind.h 'static int mm_bind(int a, int b, int c, int d, int e, int f, bool (*g)(int, int), int h, int i) { return 0; }'
finds limits.py 'loader/bind.h:mm_bind: 9 parameters, at most 8'
echo "$count violations found out"
