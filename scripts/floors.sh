#!/bin/sh
# The floors: who may include whom, read off the #include lines. One line per violation; exit status 1 if there is any.
# formats < quant < loader < {convert, runtime} < programs (minimax_*.c); tests may include anything. Outside libraries have one home each.
# In convert the rooms stand above each other: model < source < calibration < plan < write < report; none has more than 2,800 lines. No module
# (a .c, .cu or .h of one name) includes one that includes it, by whatever way.
set -u
cd "$(dirname "$0")/.."
find . \( -path ./.git -o -path ./build -o -path ./tests \) -prune -o \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print |
  sed 's|^\./||' | sort | xargs awk '
function floor(path) {
  if (path ~ /(^|\/)minimax_[^\/]*\.c$/) return 5
  sub(/\/.*/, "", path)
  return path in rank ? rank[path] : 0
}
# The room of a file in convert, or "".
function room_of(path, part) {
  return split(path, part, "/") == 3 && part[1] == "convert" ? part[2] : ""
}
function complain(why) {
  printf "%s:%d: %s\n", FILENAME, FNR, why
  bad = 1
}
BEGIN {
  rank["formats"] = 1; rank["quant"] = 2; rank["loader"] = 3; rank["convert"] = 4; rank["runtime"] = 4
  room["model"] = 1; room["source"] = 2; room["calibration"] = 3; room["plan"] = 4; room["write"] = 5; room["report"] = 6
  home["openssl"] = "^formats/(hash|sign)\\.c$"
  home["zstd"] = "^formats/frame\\.c$"
  home["event2"] = "^runtime/serve/http\\.c$"
  home["pcre2"] = "^runtime/text/tokenizer\\.c$"
  home["cuda|cub|nccl"] = "^runtime/cuda/"
  home["mpi"] = "^(convert/write/mpi|runtime/engine/processes)\\.c$"
}
FNR == 1 && room_of(FILENAME) != "" && !(room_of(FILENAME) in room) { complain("is in no room of convert") }
FNR == 1 && !floor(FILENAME) { complain("is on no floor (formats, quant, loader, convert, runtime)") }
room_of(FILENAME) != "" { lines[room_of(FILENAME)]++ }
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
  mine = floor(FILENAME)
  theirs = floor(header)
  if (!theirs) complain("\"" header "\": include paths start at the root: \"formats/base.h\"")
  else if (theirs > mine) complain("\"" header "\" is on a higher floor")
  else if (theirs == mine && mine == 4 && substr(header, 1, 4) != substr(FILENAME, 1, 4)) complain("\"" header "\": convert and runtime never include each other")
  own = room_of(FILENAME); other = room_of(header)
  if (own != "" && other != "" && room[other] > room[own]) complain("\"" header "\" is in a higher room")
  if (header ~ /^runtime\/cuda\// && FILENAME !~ /^runtime\/cuda\//) complain("\"" header "\" is only for runtime/cuda")
}
END {
  for (name in lines) if (lines[name] > 2800) { printf "convert/%s: has %d lines, more than 2800\n", name, lines[name]; bad = 1 }
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
