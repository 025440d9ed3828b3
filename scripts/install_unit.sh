#!/bin/sh
# scripts/install_unit.sh [--remove] ROOT PREFIX: the systemd unit of minimax-serve below ROOT (DESTDIR and PREFIX), with the programs of
# PREFIX. --remove: removes it, and the folders that were made for it and are empty.
set -eu
umask 022 # for all users, whatever the umask of the one that installs
[ "$1" = --remove ] && remove=1 && shift || remove=
root=$1 prefix=$2 folder=lib/systemd/system folders=share/doc/minimax/folders-of-unit
if [ "$remove" ]; then
  rm -f "$root/$folder/minimax-serve.service"
  exec scripts/install_folders.sh --remove "$root" $folders
fi
scripts/install_folders.sh "$root" $folders $folder
quote=
case $prefix in *" "*) quote='"' ;; esac
by=$(printf %s "$quote$prefix" | sed 's/%/%%/g; s/[\\&|]/\\&/g') # % is systemd's, the others are those of the next line
sed "s|/usr/local/bin/\([a-z-]*\)|$by/bin/\1$quote|" scripts/minimax-serve.service >"$root/$folder/minimax-serve.service"
chmod 644 "$root/$folder/minimax-serve.service"
