#!/bin/sh
# scripts/install_folders.sh ROOT LIST FOLDER…: makes folders below ROOT and writes those that were not there to the file LIST below it.
# Where one cannot be made, those made before it go again.
# scripts/install_folders.sh --remove ROOT LIST: removes the folders in LIST that are empty, last first, and LIST.
set -eu
umask 022 # for all users, whatever the umask of the one that installs
[ "$1" = --remove ] && remove=1 && shift || remove=
root=$1 list=$1/$2
remove_folders() { # those on stdin
  sed '1!G;h;$!d' | while IFS= read -r folder; do # last line first
    case $folder in
    ./*) rmdir "$root/$folder" 2>/dev/null || : ;;
    *) case $root/ in "$folder"/*) rmdir "$folder" 2>/dev/null || : ;; esac ;; # ROOT itself, and folders above it
    esac
  done
}
if [ "$remove" ]; then
  [ -f "$list" ] || exit 0
  folders=$(cat "$list")
  rm "$list"
  printf '%s\n' "$folders" | remove_folders
  exit 0
fi
shift 2
made=
trap '[ $? = 0 ] || printf %s "$made" | remove_folders' EXIT
folder() {
  [ -d "$1" ] && return
  folder "$(dirname "$1")"
  mkdir "$1"
  case $1 in "$root"/*) made="$made./${1#"$root"/}
" ;; *) made="$made$1
" ;; esac
}
for f; do folder "$root/$f"; done
folder "$(dirname "$list")"
printf %s "$made" >>"$list"
