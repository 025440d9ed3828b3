#!/bin/sh
# What `make install` puts below a prefix: every program, its man page and its completions, each naming every option of --help.
set -eu
prefix=$TMPDIR/usr
scripts/install.sh "$prefix" "$BUILD"/bin/*
count=0
for program in "$BUILD"/bin/*; do
  name=${program##*/}
  cmp "$program" "$prefix/bin/$name"
  man=$prefix/share/man/man1/$name.1 bash=$prefix/share/bash-completion/completions/$name
  zsh=$prefix/share/zsh/site-functions/_$name fish=$prefix/share/fish/vendor_completions.d/$name.fish
  grep -q "^\.TH $name 1" "$man" || { echo "$man: not a man page of $name"; exit 1; }
  for section in NAME SYNOPSIS OPTIONS "EXIT STATUS" EXAMPLES "SEE ALSO"; do
    grep -q "^\.SH $section$" "$man" || { echo "$man: no section $section"; exit 1; }
  done
  statuses=$(sed -n '/^\.SH EXIT STATUS/,/^\.SH [^E]/p' "$man" | grep -c '^\.TP')
  [ "$statuses" -ge 4 ] || { echo "$man: $statuses exit statuses"; exit 1; }
  bash -n "$bash"
  "$program" --help | sed -nE 's/^ +(-., )?--([a-z-]+).*/\2/p' >"$TMPDIR/options"
  [ "$(wc -l <"$TMPDIR/options")" -ge 2 ]
  while read -r option; do
    for file in "$man" "$bash" "$zsh" "$fish"; do
      tr -d '\\' <"$file" | grep -qwe "$option" || { echo "$file: --$option is missing"; exit 1; }
    done
  done <"$TMPDIR/options"
  count=$((count + 1))
done
touch "$prefix/bin/another"
scripts/install.sh --remove "$prefix" "$BUILD"/bin/*
left=$(find "$prefix" -mindepth 1 | sort | xargs)
[ "$left" = "$prefix/bin $prefix/bin/another" ] || { echo "after uninstall: $left"; exit 1; }

# What `make install` and `make uninstall` run, on trees that hold files and empty folders of others: the tree after is the tree before.
tree() { (cd "$1" && find . -printf '%p %y %l ' -type f -exec sha256sum {} \; -o -printf '%p %y\n' | sort); }
recipe() { make -n "$1" BUILD="$BUILD" DESTDIR="$2" PREFIX="$3" 2>/dev/null | grep '^scripts/install'; }
host=$TMPDIR/host
mkdir -p "$host/usr/share/man/man1" "$host/usr/share/doc" "$host/usr/lib/pkgconfig" "$host/usr/include"
echo other >"$host/usr/lib/pkgconfig/other.pc"
echo other >"$host/usr/include/other.h"
for place in "$host:/usr" "$host/stage/one:/usr/local" ":$host/new"; do
  tree "$host" >"$TMPDIR/before"
  recipe install "${place%%:*}" "${place#*:}" | sh -e
  [ "$place" != "$host:/usr" ] || { # an older release's library, then an install over it
    mv "$host/usr/lib/libminimax.so.0".?* "$host/usr/lib/libminimax.so.0.0.1" && ln -sf libminimax.so.0.0.1 "$host/usr/lib/libminimax.so.0"
    recipe install "${place%%:*}" "${place#*:}" | sh -e
  }
  root=${place%%:*}${place#*:}
  for file in bin/minimax-run lib/libminimax.so include/minimax.h lib/pkgconfig/libminimax.pc share/man/man3/libminimax.3 lib/systemd/system/minimax-serve.service; do
    [ -e "$root/$file" ] || { echo "$root/$file: not installed"; exit 1; }
  done
  grep -q "=${place#*:}/bin/minimax-serve " "$root/lib/systemd/system/minimax-serve.service" || { echo "the unit names other programs"; exit 1; }
  recipe uninstall "${place%%:*}" "${place#*:}" | sh -e
  tree "$host" | diff "$TMPDIR/before" - || { echo "$place: install and uninstall leave another tree"; exit 1; }
done
blocked=$TMPDIR/blocked # its share is a file: nothing can be installed there, and nothing stays of the try
mkdir "$blocked" && echo x >"$blocked/share"
recipe install "" "$blocked" | sh -e 2>"$TMPDIR/said" && { echo "$blocked: installed"; exit 1; }
left=$(find "$blocked" -mindepth 1 | xargs)
[ "$left" = "$blocked/share" ] || { echo "after an install that failed: $left"; exit 1; }
recipe uninstall "" "$blocked" | sh -e
left=$(find "$blocked" -mindepth 1 | xargs)
[ "$left" = "$blocked/share" ] || { echo "after the uninstall behind it: $left"; exit 1; }
for target in install uninstall; do # a unit and a pkg-config file with a relative path are of no use
  ! make -n $target BUILD="$BUILD" PREFIX="here there" >"$TMPDIR/said" 2>&1 && grep -qF 'PREFIX: found "here there", expected an absolute path' "$TMPDIR/said" ||
    { echo "$target into a relative PREFIX: $(tail -n 1 "$TMPDIR/said")"; exit 1; }
done
odd="$TMPDIR/a&b|c d%e"
scripts/install_unit.sh "$odd" "$odd"
grep -qF "ExecStart=\"$TMPDIR/a&b|c d%%e/bin/minimax-serve\" --config" "$odd/lib/systemd/system/minimax-serve.service" || { echo "$odd: the unit names other programs"; exit 1; }
scripts/install_unit.sh --remove "$odd" "$odd"
[ ! -e "$odd" ] || { echo "$odd: left"; exit 1; }

# A place with a space, by a user whose files are private: every user finds programs and library there.
open="$TMPDIR/open place"
(umask 077 && recipe install "" "$open" | sh -e)
private=$(find "$open" \( -type d -o -perm /111 -type f \) ! -perm 755 -o -type f ! -perm /111 ! -perm 644)
[ -z "$private" ] || { echo "not for all users: $private"; exit 1; }
eval "set -- $(PKG_CONFIG_PATH="$open/lib/pkgconfig" pkg-config --cflags --libs libminimax)"
[ "$*" = "-I$open/include -L$open/lib -lminimax" ] && [ $# = 3 ] || { echo "pkg-config: $# words: $*"; exit 1; }
recipe uninstall "" "$open" | sh -e
[ ! -e "$open" ] || { echo "$open: left"; exit 1; }
echo "$count programs installed and removed; three trees are after uninstall what they were before install"
