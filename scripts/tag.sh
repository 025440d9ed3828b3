#!/bin/sh
# scripts/tag.sh VERSION: the tag vVERSION on a commit of which nothing is uncommitted and whose CHANGELOG has the version's heading.
set -eu
cd "$(dirname "$0")/.."
fail() { echo "tag: $1" >&2; exit 1; }
[ -z "$(git status --porcelain --untracked-files=no)" ] || fail "found changes that are not committed, expected none"
grep -q "^## $1\b" CHANGELOG.md || fail "CHANGELOG.md: found no heading \"## $1\""
if git rev-parse -q --verify "refs/tags/v$1" >/dev/null; then
  [ "$(git rev-parse "v$1^{commit}")" = "$(git rev-parse HEAD)" ] || fail "found the tag v$1 on another commit"
else
  git tag -a "v$1" -m "minimax $1"
fi
echo "tagged v$1"
