# The start of a test of models, read by it: from the top of the tree, and a folder $work that goes when it ends.
set -eu
export LC_ALL=C
work=$(mktemp -d "${TMPDIR:-/tmp}/model.XXXXXX")
trap 'rm -rf "$work"' EXIT
