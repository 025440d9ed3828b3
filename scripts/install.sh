#!/bin/sh
# scripts/install.sh [--remove] PREFIX PROGRAM…: copies programs below PREFIX, with the man page and the shell completions that each prints.
# --remove: takes away those files, and no folder.
set -eu
[ "$1" = --remove ] && remove=1 && shift || remove=
prefix=$1
shift
bash=$prefix/share/bash-completion/completions zsh=$prefix/share/zsh/site-functions fish=$prefix/share/fish/vendor_completions.d
man=$prefix/share/man/man1
[ "$remove" ] || install -d "$prefix/bin" "$man" "$bash" "$zsh" "$fish"
for program; do
  name=${program##*/}
  if [ "$remove" ]; then
    rm -f "$prefix/bin/$name" "$man/$name.1" "$bash/$name" "$zsh/_$name" "$fish/$name.fish"
    continue
  fi
  install "$program" "$prefix/bin/$name"
  "$program" --help-man >"$man/$name.1"
  "$program" --help-bash >"$bash/$name"
  "$program" --help-zsh >"$zsh/_$name"
  "$program" --help-fish >"$fish/$name.fish"
done
