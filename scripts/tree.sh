#!/bin/sh
# The shape of the tree: file lengths, unique base names, fixed top-level names. One line per violation; exit status 1 if there is any.
set -u
cd "$(dirname "$0")/.."
sources=$(find formats quant loader convert runtime tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')
bad=$(
  # A C file is at most 600 lines.
  wc -l $sources | awk '$2 != "total" && $1 > 600 {print $2 ": " $1 " lines, at most 600"}'
  # A base name (without its extension) is one thing: x.c and x.h in one folder, never two folders.
  printf '%s\n' $sources | awk -F/ '{
    base = $NF; sub(/\.[a-z]+$/, "", base); folder = $0; sub(/\/[^\/]*$/, "", folder)
    if (base in home && home[base] != folder) print $0 ": " home[base] " has a file of this name too"
    home[base] = folder
  }'
  printf '%s\n' $sources | awk -F/ '/\/(utils?|helpers?|common|misc)(\.|\/)/ {print $0 ": a file is a noun of the field"}'
  for name in $(ls -A); do
    case $name in
      .git | .gitattributes | .ci | .clang-format | .clang-tidy | .gitignore | build | LICENSE | Makefile | pyproject.toml | README.md | CONTRIBUTING.md | CHANGELOG.md | SECURITY.md | .editorconfig | .github) ;;
      formats | quant | loader | convert | runtime | tests | scripts | docs) ;;
      *) git check-ignore -q "$name" || echo "$name: the top-level names are fixed" ;;
    esac
  done
  # Every file says what it is in its first lines.
  for file in $sources; do
    head -n 1 "$file" | grep -q '^/[/*]' || echo "$file: does not begin with a comment that says what it is"
  done
)
[ -z "$bad" ] || { printf '%s\n' "$bad"; exit 1; }
