#!/bin/sh
# scripts/screenshots.sh BUILD [OUT]: pictures of the report page and of the chat page for docs/ (docs/images by default), by headless Chromium from the
# programs in BUILD. The figures are those of tests/data/tiny-m2.
set -eu
cd "$(dirname "$0")/.."
build=$(readlink -f "$1") out=${2-docs/images}
command -v chromium >/dev/null || { echo "screenshots: no chromium here" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
source=tests/data/tiny-m2
tr '\0' '\n' <tests/data/held-out.txt >"$work/text"
for scheme in none nvfp4a16; do "$build/bin/minimax-convert" $source -o "$work/tiny-m2-$scheme" --quant $scheme -q >/dev/null; done
(cd "$work" && "$build/bin/minimax-eval" tiny-m2-nvfp4a16 --text text --against tiny-m2-none --limit 20 --json -q >kl.json)
"$build/bin/minimax-verify" "$work/tiny-m2-nvfp4a16" --source $source --report "$work/report.html" --divergence "$work/kl.json" -q >/dev/null
sed -i "s|$work/||g" "$work/report.html"
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/chromium" --window-size=1040,1180 \
  --screenshot="$work/report.png" "file://$work/report.html" >/dev/null 2>&1
mkdir "$work/shots" "$work/tmp"
PAGE_SHOTS=$work/shots BUILD=$build TMPDIR=$work/tmp python3 tests/cli/serve_page.py >/dev/null
mv "$work/report.png" "$out/report.png"
mv "$work/shots/markdown-light-1280.png" "$out/chat.png"
for picture in report chat; do
  [ "$(stat -c %s "$out/$picture.png")" -lt 150000 ] || { echo "screenshots: $out/$picture.png is larger than 150 KB" >&2; exit 1; }
done
