#!/bin/sh
# scripts/dist.sh VERSION OUT.tar.gz: the committed tree as an archive, the same bytes each time. A tag v… on the commit has to be the version's.
set -eu
version=$1 out=$2
cd "$(dirname "$0")/.."
for tag in $(git tag --points-at HEAD 'v*'); do
  [ "$tag" = "v$version" ] || { echo "dist: found the tag $tag, expected v$version (MM_VERSION in formats/system/base.h)" >&2; exit 1; }
done
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "dist: what is not committed is left out" >&2
mkdir -p "$(dirname "$out")"
git archive --format=tar --prefix="minimax-$version/" HEAD >"$out.tar"
gzip -9n <"$out.tar" >"$out"
rm "$out.tar"
echo "$out"
