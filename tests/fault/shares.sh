#!/bin/sh
# Several processes make one output: --part I/N by hand, mpirun where the build has it; the same bytes as one process, also after one of
# them was killed.
set -e
out=${TMPDIR:?}/shares
convert=$BUILD/bin/minimax-convert
mkdir -p "$out"
python3 scripts/bench_checkpoint.py "$out/src" --layers 1 --experts 8 --hidden 1024 --inter 512 --heads 8 --vocab 4096
common="$out/src --tp 2 --quant mxfp8 --part-size 2M -q"
run() { timeout 120 "$@" $common; }
run "$convert" -o "$out/one"
parts=$(ls "$out/one" | grep -c rank-00000)
[ "$parts" -ge 4 ]

pids=
for i in 0 1 2; do
  run "$convert" -o "$out/parts" --part $i/3 &
  pids="$pids $!"
done
for pid in $pids; do wait "$pid"; done
[ ! -e "$out/parts" ] # nothing is published before the last run
ls -A "$out" >"$TMPDIR/before"
status=0
run "$convert" -o "$out/parts" --resume --ignore '*gate*' 2>"$TMPDIR/err" || status=$?
[ $status -eq 2 ]
grep -q E_RESUME "$TMPDIR/err"
ls -A "$out" | diff "$TMPDIR/before" - # other options are refused and leave the shares' run as it was
run "$convert" -o "$out/parts" --resume
diff -r "$out/one" "$out/parts"
[ "$(ls -A "$out" | sort | tr '\n' ' ')" = "one parts src " ]
status=0
run "$convert" -o "$out/none" --part 3/3 2>"$out/err" || status=$?
[ $status -eq 2 ]
grep -q -- --part "$out/err"
rm "$out/err"
echo "--part: $parts parts a rank by three processes, the same bytes as one"

if ! command -v mpirun >/dev/null || ! pkg-config --exists ompi-c; then
  echo "--part done; Open MPI is not installed, so mpirun was not tried"
  exit 0
fi
make -s MPI=1 CUDA=0 SAN=0 BUILD="$BUILD/mpi" "$BUILD/mpi/bin/minimax-convert" >/dev/null
mpi() { OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 run mpirun --oversubscribe -n 4 "$BUILD/mpi/bin/minimax-convert" -j 1 "$@"; }
# A failure before the first block, of all processes or of the first alone, ends all of them and is said once.
fails() { # exit status, words of the line, options
  want=$1 words=$2 status=0
  shift 2
  mpi -o "$out/none" "$@" >"$out/said" 2>&1 || status=$?
  [ $status -eq "$want" ] && [ "$(grep -c 'minimax-convert: error' "$out/said")" -eq 1 ] && grep -q -- "$words" "$out/said" && [ ! -e "$out/none" ] && return
  cat "$out/said"
  echo "mpirun -n 4 $*: exit status $status, expected $want and one line: $words"
  exit 1
}
fails 4 E_TP --pp 9
fails 2 E_USAGE --kv-cache-dtype fp8
fails 2 "--part under mpirun" --part 0/2
fails 2 "--quant with --recipe" --recipe none.json
fails 8 E_MEMORY --mem-limit 1M
fails 5 E_IO --events "$out/absent/events"
fails 2 "--tp: found \"0\"" --tp 0
fails 2 "unknown option" --no-such-option
fails 2 "at most 1 operands" more
fails 2 E_RECIPE --print-recipe --head "a;b"
fails 3 E_FS_MISSING --draft "$out/absent" --dry-run
# Processes that were started with unlike arguments would wait for each other, or write several outputs.
unlike() { # arguments of one process, of the others
  status=0
  # shellcheck disable=SC2086
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 mpirun --oversubscribe -n 2 "$BUILD/mpi/bin/minimax-convert" $common -j 1 $1 : \
    -n 1 "$BUILD/mpi/bin/minimax-convert" $common -j 1 $2 >"$out/said" 2>&1 || status=$?
  [ $status -eq 2 ] && [ "$(grep -c 'minimax-convert: error' "$out/said")" -eq 1 ] && grep -q "E_USAGE: found other arguments in process 2 of mpirun" "$out/said" &&
    [ ! -e "$out/none" ] && [ ! -e "$out/other" ] && return
  cat "$out/said"
  echo "mpirun with \"$1\" and \"$2\": exit status $status, expected 2 and one line"
  exit 1
}
unlike "-o $out/none" "-o $out/other"
unlike "-o $out/none" "-o $out/none --dry-run"
unlike "-o $out/none" "--help"
unlike "-o $out/none" "-o $out/none --tp 0"
# Equal relative paths in different working directories are different files, unless links lead to the same.
mkdir "$out/here" "$out/there"
ln -s ../src "$out/here/src"
binary=$(realpath "$BUILD/mpi/bin/minimax-convert")
apart() { # paths, exit status
  status=0
  # shellcheck disable=SC2086
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 mpirun --oversubscribe -n 1 -wdir "$out/here" "$binary" $1 -j 1 -q : \
    -n 1 -wdir "$out/there" "$binary" $1 -j 1 -q >"$out/said" 2>&1 || status=$?
  [ $status -eq "$2" ] && return
  cat "$out/said"
  echo "mpirun in two working directories with \"$1\": exit status $status, expected $2"
  exit 1
}
apart "$out/src -o made" 2
grep -q "E_USAGE: made: found $out/there/made in process 1 of mpirun, expected $out/here/made as in process 0" "$out/said"
[ -z "$(ls -A "$out/there")" ]
apart "src -o $out/made" 2
grep -q "E_USAGE: src: found $out/there/src in process 1 of mpirun, expected $out/src as in process 0" "$out/said"
ln -s ../src "$out/there/src"
apart "src -o $out/made --tp 2" 0
rm -r "$out/here" "$out/there" "$out/made"
[ "$(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 mpirun --oversubscribe -n 3 "$BUILD/mpi/bin/minimax-convert" --version)" = "$("$BUILD/mpi/bin/minimax-convert" --version)" ]
rm "$out/said"
[ "$(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 mpirun --oversubscribe -n 3 "$BUILD/mpi/bin/minimax-convert" --print-recipe)" = "$("$convert" --print-recipe)" ]
mpi -o "$out/mpi"
diff -r "$out/one" "$out/mpi"
# One process is killed at its third block write: mpirun ends the others; what is done stays.
status=0
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 mpirun --oversubscribe -n 3 "$BUILD/mpi/bin/minimax-convert" -j 1 -o "$out/killed" $common : \
  -n 1 strace -f -o /dev/null -e inject=pwrite64:signal=KILL:when=3 "$BUILD/mpi/bin/minimax-convert" -j 1 -o "$out/killed" $common >/dev/null 2>&1 || status=$?
[ $status -ne 0 ]
[ ! -e "$out/killed" ]
mpi -o "$out/killed" --resume
diff -r "$out/one" "$out/killed"
# Weights that are not finite are counted once, those of all processes.
python3 - "$out/src" <<'END'
import glob, json, struct, sys
for path in glob.glob(sys.argv[1] + "/*.safetensors"):
    with open(path, "r+b") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        for t in json.loads(f.read(n)).values():
            if t.get("dtype") == "BF16":
                f.seek(8 + n + t["data_offsets"][0])
                f.write(b"\xc0\x7f")
END
"$convert" "$out/src" -o "$out/zeroed" --allow-nonfinite 2>&1 | grep "stored as 0" >"$out/want"
OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 mpirun --oversubscribe -n 4 "$BUILD/mpi/bin/minimax-convert" "$out/src" -o "$out/counted" -j 1 \
  --part-size 2M --allow-nonfinite 2>&1 | grep "stored as 0" | diff "$out/want" -
echo "--part and mpirun -n 4: the same bytes as one process, also after one was killed"
