#!/bin/sh
# scripts/install.sh [--remove] PREFIX PROGRAM…: copies programs below PREFIX, with the man page and the shell completions that each prints.
# --remove: removes those files, and the folders that were made for them and are empty.
set -eu
umask 022 # for all users, whatever the umask of the one that installs
[ "$1" = --remove ] && remove=1 && shift || remove=
prefix=$1
shift
bash=share/bash-completion/completions zsh=share/zsh/site-functions fish=share/fish/vendor_completions.d man=share/man/man1
folders=share/doc/minimax/folders-of-programs
[ "$remove" ] || scripts/install_folders.sh "$prefix" $folders bin $man $bash $zsh $fish
for program; do
  name=${program##*/}
  if [ "$remove" ]; then
    rm -f "$prefix/bin/$name" "$prefix/$man/$name.1" "$prefix/$bash/$name" "$prefix/$zsh/_$name" "$prefix/$fish/$name.fish"
    continue
  fi
  install "$program" "$prefix/bin/$name"
  "$program" --help-man >"$prefix/$man/$name.1"
  "$program" --help-bash >"$prefix/$bash/$name"
  "$program" --help-zsh >"$prefix/$zsh/_$name"
  "$program" --help-fish >"$prefix/$fish/$name.fish"
done
[ -z "$remove" ] || scripts/install_folders.sh --remove "$prefix" $folders
