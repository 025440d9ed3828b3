#!/bin/sh
# scripts/install.sh PREFIX PROGRAM…: copies programs below PREFIX, with the man page and the shell completions that each prints.
set -eu
prefix=$1
shift
bash=$prefix/share/bash-completion/completions zsh=$prefix/share/zsh/site-functions fish=$prefix/share/fish/vendor_completions.d
install -d "$prefix/bin" "$prefix/share/man/man1" "$bash" "$zsh" "$fish"
for program; do
  name=${program##*/}
  install "$program" "$prefix/bin/$name"
  "$program" --help-man >"$prefix/share/man/man1/$name.1"
  "$program" --help-bash >"$bash/$name"
  "$program" --help-zsh >"$zsh/_$name"
  "$program" --help-fish >"$fish/$name.fish"
done
