#!/bin/sh
# Too little disk, address space or descriptors: a documented status and one line, or success; never anything else.
convert=$BUILD/bin/minimax-convert
out=${TMPDIR:?}/limits
mkdir -p "$out/disk"
command -v prlimit >/dev/null || { echo "no prlimit here"; exit 1; }
"$convert" tests/data/tiny-m2 -o "$out/one" --tp 2 --quant block_fp8 -q || exit 1
cases=0 made=0 refused=0
# some WHAT: since the last call one run was done and one refused, so that the limits are those that matter.
some() {
  [ $made -gt 0 ] && [ $refused -gt 0 ] || { echo "$1: $made runs done, $refused refused, expected some of each"; exit 1; }
  made=0 refused=0
}
# judge NAME STATUS ALLOWED: the status is allowed, stderr has one line unless it is 0, and the output is whole or absent.
judge() {
  cases=$((cases + 1))
  case " $3 " in *" $2 "*) ;; *) echo "$1: status $2, expected one of $3"; cat "$out/err"; exit 1 ;; esac
  [ "$2" -eq 0 ] || [ "$(wc -l <"$out/err")" -eq 1 ] || { echo "$1: more than one line"; cat "$out/err"; exit 1; }
  # The line names the limit that is too low; of a full disk there is none.
  case $2:$1 in 0:* | 127:* | *:tmpfs*) ;; *) grep -q "the limit is [0-9]* .*(ulimit -[nv])" "$out/err" || { echo "$1: no limit in the line"; cat "$out/err"; exit 1; } ;; esac
  case $2 in 0) made=$((made + 1)) ;; 127) ;; *) refused=$((refused + 1)) ;; esac
  if [ "$2" -eq 0 ]; then diff -r "$out/one" "$4" >/dev/null; else [ ! -e "$4" ]; fi || { echo "$1: status $2, but the output is wrong"; exit 1; }
}

if mount -t tmpfs -o size=1m tmpfs "$out/disk" 2>/dev/null; then
  trap 'umount "$out/disk"' EXIT
  for kib in $(seq 256 256 12288); do
    mount -o remount,size=${kib}k "$out/disk" || exit 1
    status=0
    "$convert" tests/data/tiny-m2 -o "$out/disk/x" --tp 2 --quant block_fp8 -q --restart 2>"$out/err" || status=$?
    judge "tmpfs of $kib KiB" $status "0 5" "$out/disk/x"
    rm -rf "$out/disk/x" "$out"/disk/.x*
  done
  disk="$cases disk sizes"
  some "disk sizes"
else
  disk="no tmpfs may be mounted here, so disk sizes were not tried"
fi
for mib in $(seq 20 20 400); do
  status=0
  prlimit --as=$((mib * 1048576)) "$convert" tests/data/tiny-m2 -o "$out/x" --tp 2 --quant block_fp8 -q --restart 2>"$out/err" || status=$?
  # 127: the loader could not map the libraries; nothing of ours ran
  judge "address space of $mib MiB" $status "0 8 127" "$out/x"
  rm -rf "$out/x" "$out"/.x*
done
some "address space"
for n in $(seq 4 2 40); do
  status=0
  prlimit --nofile=$n "$convert" tests/data/tiny-m2 -o "$out/x" --tp 2 --quant block_fp8 -q --restart 2>"$out/err" || status=$?
  judge "$n descriptors" $status "0 5 127" "$out/x"
  rm -rf "$out/x" "$out"/.x*
done
some "descriptors"
# The other programs, and threads.
names() { # limit, status, words, command
  limit=$1 want=$2 words=$3 status=0
  shift 3
  prlimit "$limit" "$@" >"$out/err" 2>&1 || status=$?
  [ $status -eq "$want" ] && grep -q -- "$words" "$out/err" && return
  cat "$out/err"
  echo "$limit $*: status $status, expected $want and: $words"
  exit 1
}
few="Too many open files; the limit is 4 descriptors (ulimit -n)"
names --nofile=4 5 "$few" "$BUILD/bin/minimax-verify" "$out/one"
names --nofile=4 5 "$few" "$BUILD/bin/minimax-inspect" "$out/one"
names --nofile=4 5 "$few" "$BUILD/bin/minimax-run" "$out/one" -p hi -n 1
names --nofile=4 5 "$few" "$BUILD/bin/minimax-archive" pack "$out/one" -o "$out/archive"
if [ "${SAN:-0}" = 0 ]; then
  names --data=20480000 8 "E_[A-Z]*: .*; the limit is .*20000 KiB of data (ulimit -d)" "$BUILD/bin/minimax-run" "$out/one" -p hi -n 1
  # What the program takes itself, code for GPUs too, and some that its threads do not fit into.
  own=$(size "$BUILD/bin/minimax-run" | awk 'NR == 2 { print $4 }')
  names --as=$((own + 22240000)) 8 "E_THREADS: start a thread for rank [01]: .*; the limit is .*[0-9] KiB of address space (ulimit -v)" "$BUILD/bin/minimax-run" "$out/one" -p hi -n 1
fi
# A small stack: the mark of a file to be replaced is looked for in much of it.
openssl ecparam -genkey -name prime256v1 -noout -out "$out/key.pem"
for run in first again; do
  [ "${SAN:-0}" = 0 ] || break
  (ulimit -s 128 && "$BUILD/bin/minimax-archive" sign "$out/one" --key "$out/key.pem" -q) || { echo "a stack of 128 KiB: $run: status $?"; exit 1; }
done
echo "limits: $cases cases right ($disk, address space 20 to 400 MiB, 4 to 40 descriptors, a small stack)"
