#!/bin/sh
# README.md and docs/ say what the tree does: every error code has its row in docs/errors.md, every row its code and the statuses of the sources;
# every file, name, field, make target, program, option and link that a page names exists; a page names every option; README is at most 10 KB.
set -eu
sources='formats quant loader convert runtime'
errors=docs/errors.md
wrong=$TMPDIR/wrong
: >"$wrong"
# absent PAGE WHAT: notes each line of stdin.
absent() {
  sed "s|^|$1: $2: |" >>"$wrong"
}

grep -rhoE '"E_[A-Z0-9_]+"' --include='*.[ch]' --include='*.cu' $sources | tr -d '"' | sort -u >"$TMPDIR/codes"
sed -n 's/^| `\(E_[A-Z0-9_]*\)`.*/\1/p' $errors | sort >"$TMPDIR/rows"
[ -s "$TMPDIR/codes" ]
[ -s "$TMPDIR/rows" ]
comm -23 "$TMPDIR/codes" "$TMPDIR/rows" | absent $errors "no row for the error code"
comm -13 "$TMPDIR/codes" "$TMPDIR/rows" | absent $errors "a row for a code that no source has"
# The status that a source gives beside a code is one of its row.
grep -rhozE 'MM_[A-Z_]+,\s*"E_[A-Z0-9_]+"' --include='*.[ch]' --include='*.cu' $sources | tr '\0\n' '\n ' | tr -d ' "' | sort -u >"$TMPDIR/given"
[ "$(wc -l <"$TMPDIR/given")" -gt 100 ]
awk '
  BEGIN {
    n = split("BUG 1 USAGE 2 BAD_INPUT 3 UNSUPPORTED 4 IO 5 INTEGRITY 6 LOCKED 7 LIMIT 8 INTERRUPTED 75", word, " ")
    for (i = 1; i < n; i += 2) number["MM_" word[i]] = word[i + 1]
  }
  NR == FNR { if (/^[|] `E_/) { split($0, cell, " *[|] *"); row[cell[2]] = ", " cell[3] "," } next }
  split($0, pair, ",") == 2 && pair[1] in number && !index(row["`" pair[2] "`"], ", " number[pair[1]] ",") { print pair[2], number[pair[1]] }
' $errors "$TMPDIR/given" | absent $errors "a row lacks the status"
[ "$(wc -c <README.md)" -le 10240 ] || echo "more than 10 KB" | absent README.md size

pages='README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs/*.md'
for page in $pages; do
  grep -oE '`[a-z]+/[A-Za-z0-9_./-]+`' "$page" | tr -d '`' | sort -u | while read -r path; do
    case $path in build/*) ;; *) [ -e "$path" ] || echo "$path" ;; esac
  done | absent "$page" "no such file"
  grep -oE '\]\([A-Za-z0-9_./-]+\)' "$page" | sed 's/^](//; s/)$//' | sort -u | while read -r path; do
    [ -e "$(dirname "$page")/$path" ] || echo "$path"
  done | absent "$page" "a link to nothing"
  grep -oE '\bmm_[a-z0-9_]+(\.[a-z_][a-z0-9_]*)?' "$page" | sort -u | while read -r name; do
    for word in $(echo "$name" | tr . ' '); do grep -rqw "$word" --include='*.[ch]' --include='*.cu' $sources || echo "$name"; done
  done | absent "$page" "no such name in the sources"
  grep -oE '(^\$ |`)make [a-z-]+' "$page" | sed 's/.*make //' | sort -u | while read -r target; do
    cat Makefile tests/tests.mk | grep -q "^$target:.*## " || echo "$target"
  done | absent "$page" "no such make target"

  # Command lines: those that begin with a program's name, after a prompt or in backticks.
  grep -oE '(^\$ |`)minimax-[a-z]+( [^`]*)?($|`)' "$page" | tr -d '`' | sed 's/^\$ //' | while read -r program words; do
    if [ ! -x "$BUILD/bin/$program" ]; then
      echo "$program"
      continue
    fi
    "$BUILD/bin/$program" --help >"$TMPDIR/help"
    for word in $words; do
      case $word in --[a-z]*) grep -qE -e "(^|[ ,])${word%%=*}([ ,=]|\$)" "$TMPDIR/help" || echo "$program $word" ;; esac
    done
  done | absent "$page" "no such program or option"
done

# Every option of a program is named in some page.
for program in "$BUILD"/bin/minimax-*; do
  "$program" --help | sed -nE 's/^ +(-., )?(--[a-z][a-z-]*).*/\2/p' >"$TMPDIR/options"
  [ -s "$TMPDIR/options" ]
  while read -r option; do
    grep -qE -e "(^|[^-a-z])$option([^-a-z]|\$)" $pages formats/*.md runtime/cuda/README.md || echo "${program##*/} $option"
  done <"$TMPDIR/options" | absent "docs" "no page has the option"
done

# The images build with what scripts/bootstrap.sh installs to build.
sed -n "s/^build='\(.*\)'$/\1/p" scripts/bootstrap.sh | tr ' ' '\n' | sort >"$TMPDIR/packages"
[ "$(wc -l <"$TMPDIR/packages")" -ge 5 ]
for image in scripts/Dockerfile scripts/Dockerfile.cuda; do
  sed -n '/AS build/,/^COPY/p' $image | tr -d '\\\n' | sed 's/.*--no-install-recommends//; s/COPY.*//' | tr -s ' ' '\n' | grep . | sort |
    diff "$TMPDIR/packages" - | absent $image "another package than in scripts/bootstrap.sh"
done

cat "$wrong"
[ ! -s "$wrong" ]
echo "$(wc -l <"$TMPDIR/rows") error codes, and all that $(echo $pages | wc -w) pages name, are there"
