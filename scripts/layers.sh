#!/bin/sh
# The layers: who may include whom, read off the #include lines. One line per violation; exit status 1 if there is any.
# formats < quant < loader < {convert, runtime} < programs (minimax_*.c); tests may include anything. Outside libraries have one home each.
# Folders of one layer have a rank each (the table below): a file includes only its own folder and folders of a lower rank. No folder of convert
# has more than 2,800 lines. A folder with a seam is included from elsewhere by that header alone. No module (a .c, .cu or .h of one name) includes one that includes it, directly or through others.
set -u
cd "$(dirname "$0")/.."
find . \( -path ./.git -o -path ./build -o -path ./tests \) -prune -o \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print |
  sed 's|^\./||' | sort | xargs awk '
function layer_of(path) {
  if (path ~ /(^|\/)minimax_[^\/]*\.c$/) return 5
  sub(/\/.*/, "", path)
  return path in rank ? rank[path] : 0
}
# The folder of a file; programs stand above all folders.
function folder_of(path) {
  sub(/\/[^\/]*$/, "", path)
  return path
}
# Ranks of folders, lowest first. Folders of one rank never include each other.
function order(folders, part, i, n) {
  n = split(folders, part, " ")
  for (i = 1; i <= n; i++) {
    if (part[i] == "<") level++
    else room[part[i]] = level
  }
}
function complain(why) {
  printf "%s:%d: %s\n", FILENAME, FNR, why
  bad = 1
}
BEGIN {
  rank["formats"] = 1; rank["quant"] = 2; rank["loader"] = 3; rank["convert"] = 4; rank["runtime"] = 4
  order("formats/system < formats")
  order("quant")
  order("loader < loader/stream loader/archive")
  order("convert/model < convert/source < convert/decode < convert/calibration < convert/plan < convert/write < convert/report")
  order("runtime/engine < runtime/bench < runtime/text runtime/schedule runtime/cpu runtime/cuda/dispatch < runtime/chat runtime/cuda/core \
         < runtime/constrain runtime/cuda/comm < runtime/serve runtime/cuda/gemm runtime/cuda/attention runtime/cuda/lightning \
         runtime/cuda/sampling < runtime/cuda < runtime/cuda/moe")
  seam["runtime/constrain"] = "runtime/constrain/constrain.h"
  home["openssl"] = "^formats/(hash|sign)\\.c$"
  home["zstd"] = "^formats/frame\\.c$"
  home["histedit"] = "^runtime/chat/line_edit\\.c$"
  home["event2"] = "^runtime/serve/http\\.c$"
  home["pcre2"] = "^(convert/model/pattern|runtime/text/tokenizer)\\.c$"
  home["cuda|cub|nccl"] = "^runtime/cuda/"
  home["mpi"] = "^(formats/mpi|runtime/engine/processes)\\.c$"
}
FNR == 1 && !layer_of(FILENAME) { complain("is in no layer (formats, quant, loader, convert, runtime)") }
FNR == 1 && layer_of(FILENAME) && layer_of(FILENAME) < 5 && !(folder_of(FILENAME) in room) { complain("is in no folder of the table in scripts/layers.sh") }
{ lines[folder_of(FILENAME)]++ }
/^[ \t]*#[ \t]*include[ \t]*</ {
  match($0, /<[^>]*>/)
  header = tolower(substr($0, RSTART + 1, RLENGTH - 2))
  for (library in home) {
    if (header ~ "^(" library ")" && FILENAME !~ home[library]) complain("<" header "> belongs only in " home[library])
  }
  next
}
/^[ \t]*#[ \t]*include[ \t]*"/ {
  match($0, /"[^"]*"/)
  header = substr($0, RSTART + 1, RLENGTH - 2)
  mine = layer_of(FILENAME); own = folder_of(FILENAME); other = folder_of(header)
  theirs = layer_of(header)
  if (!theirs) complain("\"" header "\": include paths start at the root: \"formats/system/base.h\"")
  else if (theirs > mine) complain("\"" header "\" is in a higher layer")
  else if (theirs == mine && mine == 4 && substr(header, 1, 4) != substr(FILENAME, 1, 4)) complain("\"" header "\": convert and runtime never include each other")
  else if (header ~ /^runtime\/cuda\// && FILENAME !~ /^runtime\/cuda\//) complain("\"" header "\" is only for runtime/cuda")
  else if (own != other && other in seam && header != seam[other]) complain("\"" header "\" is private to its folder: include " seam[other])
  else if (mine < 5 && theirs == mine && own != other && room[other] >= room[own]) complain("\"" header "\" is in a folder of no lower rank")
}
END {
  for (name in lines) if (name ~ /^convert\// && lines[name] > 2800) { printf "%s: has %d lines, more than 2800\n", name, lines[name]; bad = 1 }
  exit bad
}
'
status=$?

# Circles: tsort names the members of one.
circle=$(find formats quant loader convert runtime \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print | sort | xargs awk '
/^[ \t]*#[ \t]*include[ \t]*"/ {
  match($0, /"[^"]*"/)
  to = substr($0, RSTART + 1, RLENGTH - 2)
  from = FILENAME
  sub(/\.[a-z]+$/, "", from); sub(/\.[a-z]+$/, "", to)
  if (from != to) print from, to
}' | tsort 2>&1 >/dev/null | sed 's/^tsort: //' | grep -v 'input contains a loop' | tr '\n' ' ')
[ -z "$circle" ] || { echo "modules that include each other: $circle"; status=1; }
exit $status
