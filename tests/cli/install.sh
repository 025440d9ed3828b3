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
  [ "$(wc -l <"$TMPDIR/options")" -ge 3 ]
  while read -r option; do
    for file in "$man" "$bash" "$zsh" "$fish"; do
      tr -d '\\' <"$file" | grep -qwe "$option" || { echo "$file: --$option is missing"; exit 1; }
    done
  done <"$TMPDIR/options"
  count=$((count + 1))
done
touch "$prefix/bin/another"
scripts/install.sh --remove "$prefix" "$BUILD"/bin/*
left=$(find "$prefix" -type f)
[ "$left" = "$prefix/bin/another" ] || { echo "after uninstall: $left"; exit 1; }
echo "$count programs installed and removed"
