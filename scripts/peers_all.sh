#!/bin/bash
# scripts/peers_all.sh BUILD DOWNLOADS: schemas, calls, scores and tests of other programs, one line a row: ok or FAIL, the row, its figure. Status 1
# if a row does not hold. Rows of time have the machine's load next to them. BUILD/peers-all has each row's whole output.
# DOWNLOADS: a folder for sources of llama-cpp-python, vllm and jsonschema, fetched from PyPI if they are not there.
# PEERS_VENV: a Python environment, made if it is not there, with what scripts/peers_servers.py, peers_schemas.py and peers_suite.py want;
# LANGCHAIN_VENV: the same for scripts/peers_langchain.py. CHAT_TEMPLATES: a folder with the released MiniMax-M1.jinja and MiniMax-M2.jinja.
# ROWS="schemas suite langchain llama vllm lm-eval masks bits fields": the rows wanted.
set -u
cd "$(dirname "$0")/.." || exit 2
[ $# -eq 2 ] || { sed -n '2,8s/^# //p' "$0" >&2; exit 2; }
build=$(realpath "$1") downloads=$(realpath "$2") failed=0
python3 scripts/sdist.py "$downloads" llama-cpp-python==0.3.36 vllm==0.33.0 jsonschema==4.26.0 || exit 2
export CHAT_TEMPLATES=${CHAT_TEMPLATES:-../shared/templates} CUDA=0 BUILD=$build
PEERS_VENV=${PEERS_VENV:-$build/peers-venv} LANGCHAIN_VENV=${LANGCHAIN_VENV:-$build/langchain-venv}
out=$build/peers-all
mkdir -p "$out/models" "$out/tmp"
export TMPDIR=$out/tmp

wanted() { [[ " ${ROWS:-schemas suite langchain llama vllm lm-eval masks bits fields} " == *" $1 "* ]]; }
load() { cut -d ' ' -f 1 /proc/loadavg; }
# row NAME COMMAND…: runs it; the row's figure is what `figure` finds in its output, and it holds if `holds` does too.
row() {
  local name=$1 began=$SECONDS status=ok
  shift
  "$@" >"$out/$name.txt" 2>"$out/$name.err" && holds "$out/$name.txt" || { status=FAIL failed=1; }
  printf '%-4s  %-9s  %4d s  %s\n' $status "$name" $((SECONDS - began)) "$(figure "$out/$name.txt")"
}
holds() { true; }
figure() { tail -n 1 "$1"; }

[ -x "$PEERS_VENV/bin/python" ] || scripts/venv.sh "$PEERS_VENV" pytest==9.2.0 pytest-asyncio==1.5.0 pytest-timeout==2.4.0 openai==3.57.0 anthropic==2.14.0 \
  requests httpx regex filelock aiohttp numpy==2.4.6 prometheus_client transformers==5.24.0 jinja2 safetensors jsonschema==4.26.0 llguidance==1.9.1 || exit 2
"$PEERS_VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("xgrammar"))' || "$PEERS_VENV/bin/pip" install --quiet --no-deps xgrammar==0.2.9 apache-tvm-ffi
[ -x "$LANGCHAIN_VENV/bin/python" ] || scripts/venv.sh "$LANGCHAIN_VENV" langchain-tests==1.1.7 langchain-openai==1.2.1 langchain-core==1.3.3 || exit 2
python=$PEERS_VENV/bin/python
make -s BUILD="$build" -j"$(nproc)" all tests "$build/tests/bench/bench_masks" "$build/tests/bench/bench_tokenizer" >"$out/make.txt" 2>&1 || { tail "$out/make.txt" >&2; exit 2; }
m1=$out/models/tiny-m1 m2=$out/models/tiny-m2
for m in tiny-m1 tiny-m2; do "$build/bin/minimax-convert" "tests/data/$m" -o "$out/models/$m" --force >"$out/convert.txt" 2>&1 || exit 2; done

everyday() { make -s BUILD="$build" check/interop/schemas.py && grep -h 'everyday schemas' "$build/check/interop/schemas.py.log" && "$python" scripts/peers_schemas.py "$build" 200 3; }
if wanted schemas; then
  holds() { [ "$(sed -n 's/^\([0-9]*\) of 35 everyday schemas are served$/\1/p' "$1")" -ge 33 ]; }
  figure() { echo "$(grep -E '^[0-9]+ of 35|^(llguidance|xgrammar) .*: [0-9]+ of' "$1" | sed 's/, compiled.*//' | paste -sd ';')"; }
  row schemas everyday
fi
if wanted suite; then
  tar xzf "$downloads"/jsonschema-*.tar.gz -C "$out" || exit 2
  served() { sed -n "s/^$1.*: \([0-9]*\) of [0-9]* schemas served, .*/\1/p" "$2" | head -n 1; }
  holds() { grep -q 'whole replies, each valid' "$1" && [ "$(served minimax-serve "$1")" -ge "$(served xgrammar "$1")" ]; }
  figure() { grep -E 'schemas served, |each valid' "$1" | sed 's/;.*//' | paste -sd ';'; }
  row suite "$python" scripts/peers_suite.py "$build" "$out"/jsonschema-*/json
fi
holds() { true; }
figure() { sed 's/^  //' "$1" | head -n 4 | paste -sd ' '; }
wanted langchain && row langchain "$LANGCHAIN_VENV/bin/python" scripts/peers_langchain.py "$build" "$m2:minimax-m2"
wanted llama && row llama "$python" scripts/peers_servers.py "$build" llama.cpp "$(ls "$downloads"/llama_cpp_python-*.tar.gz)" "$m1:minimax-m1,$m2:minimax-m2"
wanted vllm && row vllm "$python" scripts/peers_servers.py "$build" vllm "$(ls "$downloads"/vllm-*.tar.gz)" "$m1:minimax-m1,$m2:minimax-m2"
holds() { true; }
figure() { tail -n 1 "$1"; }
wanted lm-eval && row lm-eval make -s BUILD="$build" lm-eval
if wanted masks; then
  masks() { echo "load before $(load)"; "$build/tests/bench/bench_masks" 100 1; }
  holds() { [ "$(sed -n 's/^steps of 64 .*, \([-+.0-9]*\) %$/\1/p' "$1" | awk '$1 <= 2' | wc -l)" = 3 ]; }
  figure() { echo "$(sed -n 's/^steps of 64 requests on a device of 3 ms: //p' "$1" | paste -sd ';'); $(head -n 1 "$1"), after $(load)"; }
  row masks masks
fi
holds() { true; }
figure() { tail -n 2 "$1" | paste -sd ';' | tr -s ' '; }
# Rows with masks, drafts and cached prefixes against rows alone; and requests of every API, schemas among them, to a server that drafts and caches.
bits() { make -s BUILD="$build" check/unit/runtime/test_schedules && python3 tests/fault/serve_sequences.py 60 7; }
wanted bits && row bits bits
wanted fields && row fields make -s BUILD="$build" check/cli/serve_fields.py check/interop/schemas.py
exit $failed
