#!/bin/sh
# scripts/bootstrap.sh demo | check: installs what is missing with apt (as root or with sudo), then runs `make demo` or
# `make check`. Arguments after the first go to make. The demo leaves GPU code out on a machine without an NVIDIA GPU, unless CUDA is set.
# The demo was run in bare roots of Debian 12, Debian 13 and Ubuntu 24.04.
set -eu
cd "$(dirname "$0")/.."

# OpenSSL 3.5's static library, of Debian 13, needs zlib. The sanitizers' runtime has the version of the system's clang in its name.
case $(. /etc/os-release 2>/dev/null && echo "${VERSION_CODENAME-}") in
  trixie) clang=19 ;;
  noble) clang=18 ;;
  *) clang=14 ;;
esac
build='gcc g++ libc6-dev make pkg-config libzstd-dev libssl-dev libpcre2-dev libevent-dev libedit-dev'
case ${1-} in
  demo) packages=$build ;;
  check) packages="$build ca-certificates git zlib1g-dev libcmocka-dev clang clang-format clang-tidy libclang-rt-$clang-dev binutils valgrind libc6-dbg strace zstd openssl curl python3 python3-venv" ;;
  *) echo "usage: scripts/bootstrap.sh demo | check" >&2; exit 2 ;;
esac
target=$1
shift

missing=
for package in $packages; do
  case $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) in *' installed') ;; *) missing="$missing $package" ;; esac
done
if [ -n "$missing" ]; then
  command -v apt-get >/dev/null || { echo "bootstrap: no apt-get here; install by hand:$missing" >&2; exit 2; }
  root=
  [ "$(id -u)" -eq 0 ] || root='sudo'
  echo "bootstrap: installing$missing"
  $root apt-get update -q
  $root env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $missing
fi
# GPU code takes most of the time of a build, and the demo runs on the CPU.
gpu_found() { ls /dev/nvidia[0-9]* >/dev/null 2>&1 || nvidia-smi -L >/dev/null 2>&1; }
cuda_given() { [ -n "${CUDA+set}" ] || case " $*" in *' CUDA='*) ;; *) false ;; esac; }
if [ "$target" = demo ] && ! cuda_given "$@" && command -v "${NVCC:-nvcc}" >/dev/null && ! gpu_found; then
  echo 'bootstrap: found nvcc and no GPU, building without GPU code; with it: scripts/bootstrap.sh demo CUDA=1'
  set -- CUDA=0 "$@"
fi
exec make "$target" "$@"
