# shellcheck shell=sh disable=SC2034,SC2154 # set here for the scripts, or there
# scripts/bare_root.sh, read by release_test.sh and clone_test.sh: bare roots of Debian and Ubuntu, and programs in a copy of one.

# the releases of which there are roots by default
roots='build/release/bookworm build/release/trixie build/release/noble'

# make_root ROOT: a bare root, with python3-venv, of the release for which the folder ROOT is named, by debootstrap. False, with debootstrap's last
# words, where it cannot make one (no root, no mirror, no keyring).
make_root() {
  suite=$(basename "$1") log=$(mktemp) mirror='' script=''
  if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then echo "no $suite: not root, or no debootstrap" >&2; return 1; fi
  case $suite in noble | jammy) mirror=http://archive.ubuntu.com/ubuntu script=/usr/share/debootstrap/scripts/gutsy ;; esac
  mkdir -p "$(dirname "$1")"
  # shellcheck disable=SC2086 # empty, or one word each
  if debootstrap --variant=minbase --include=python3-venv ${mirror:+--components=main,universe} "$suite" "$1.new" $mirror $script >"$log" 2>&1; then
    mv "$1.new" "$1" && rm "$log"
  else
    echo "no $suite: $(tail -n 1 "$log")" >&2
    rm -rf "$1.new" "$log"
    return 1
  fi
}

# in_root PROGRAM ARGUMENT…: runs the program in $root, or, where that is no root of a system, $root/PROGRAM here.
in_root() {
  if [ -d "$root/etc" ]; then
    # shellcheck disable=SC2016 # words of the inner shell
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C HOME=/root unshare -m sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' "$root" "$@"
  else
    program=$1
    shift
    (cd "$root" && env -i LC_ALL=C "$root$program" "$@")
  fi
}

# tree [FOLDER…]: a line for each path in $root, with type, mode, owner, target of a link, and SHA-256 of a file. Without the records that dpkg and
# apt keep of what they did, and without the FOLDERs.
tree() {
  (
    cd "$root" || exit
    left_out='-path ./var/lib/dpkg -o -path ./var/lib/apt -o -path ./var/log -o -path ./var/cache'
    for folder; do left_out="$left_out -o -path $folder"; done
    # shellcheck disable=SC2086 # words of find
    {
      find . \( $left_out \) -prune -o -printf '%p %y %m %U:%G %l\n'
      find . \( $left_out \) -prune -o -type f -print0 | xargs -0r sha256sum
    } | sort
  )
}

# text BIN [SOURCE]: converts, verifies and runs the small checkpoint in $try/source, which is $root/try/source, or in SOURCE by the programs in BIN,
# then has a reply of a conversation. In a root of a system, which has no GPU, --device cuda is answered by one line.
text() {
  in_root "$1/minimax-convert" "${2-$try/source}" -o "$try/packed" --tp 2 --quant block_fp8 -q >/dev/null
  in_root "$1/minimax" verify "$try/packed" -q >/dev/null
  in_root "$1/minimax-run" "$try/packed" -p 'In the beginning' --max-tokens 40 >"$work/text" 2>/dev/null
  grep -q 'of the LORD' "$work/text" || fail "$1: found the text \"$(cat "$work/text")\""
  echo Hello | in_root "$1/minimax" run "$try/packed" --chat --max-tokens 40 >"$work/reply" 2>&1
  reply "$work/reply" || fail "$1: found the reply \"$(cat "$work/reply")\""
  if [ -d "$root/etc" ]; then
    ! in_root "$1/minimax-run" "$try/packed" -p Hello --device cuda >"$work/refused" 2>&1 || fail "$1: --device cuda runs without a GPU"
    if [ "$(wc -l <"$work/refused")" != 1 ] || ! grep -q 'error: E_.*CUDA' "$work/refused"; then
      fail "$1: --device cuda: found \"$(cat "$work/refused")\""
    fi
  fi
  rm -rf "$root/try/packed"
}

# reply FILE: whether FILE, of minimax run --chat, has words but for its notes; the small model reasons and seldom ends it.
reply() { grep -v '^note: ' "$1" | grep -q '[a-z]\{3\} [a-z]\{3\}'; }
