#!/usr/bin/env python3
"""The language of the tree (CONTRIBUTING.md): one line per finding, exit status 1 if there is any. --count prints figures per folder instead.

Comments: at most 2 in 100 sentences of a folder begin with What, Whether, Whoever, Those, Of, That, Nor or So. Words of no field, and field's words
used for something else, stand neither in comments nor in names (BANNED). No type name is defined in two files."""
import collections, os, re, subprocess, sys

BEGINNING = re.compile(r"(What|Whether|Whoever|Those|Of|That|Nor|So)\b")
SHARE = 0.02
# Words in comments. A word with another meaning in the field has that one here: "room" of a buffer is capacity, "told" is published.
BANNED = re.compile(
    r"\b(copy engine|in vain|patience|whom|let down|hurt|mends?|mended|mending|heals?|healed|blames?|blamed|parcels?|rehears\w*|put off|luck|"
    r"apart|stretch|stretches|twins?|dialects?|beside|told|tells?|waiters?|ask ahead|skinny)\b", re.I)
# Parts of names between underscores.
NAMES = re.compile(
    r"(?:^|_)(apart|hurt|vain|patience|whom|mend|heal|blame|parcel|rehears\w*|stretch|stretches|twin|luck|dialect|beside|told|tell|tells|skinny)(?:_|$)", re.I)
TYPE = re.compile(r"^(?:typedef )?(?:struct|enum|union) (mm_\w+) \{|^\} (mm_\w+);", re.M)
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def sentences(comment):
    text = re.sub(r"^\s*(\*|//|/\*)+ ?", "", comment.removesuffix("*/"), flags=re.M)
    return [s for s in (p.strip() for p in re.split(r"(?<=[.:;!?])\s+|\n\s*\n", " ".join(text.split()))) if len(s.split()) > 1]


def main():
    files = subprocess.check_output(["git", "ls-files", "*.c", "*.h", "*.cu", "*.cuh"], text=True).split()
    total, begun, where, found, types = collections.Counter(), collections.Counter(), collections.defaultdict(list), [], {}
    for path in files:
        text = open(path, encoding="utf-8").read()
        folder = os.path.dirname(path) if not path.startswith("tests/") else "tests"
        for m in COMMENT.finditer(text):
            if m[0][0] != "/":
                continue
            line = text.count("\n", 0, m.start()) + 1
            for s in sentences(m[0]):
                total[folder] += 1
                if BEGINNING.match(s):
                    begun[folder] += 1
                    where[folder].append(f"{path}:{line}: a sentence begins with {s.split()[0]}: {s[:70]}")
            for w in BANNED.finditer(m[0]):
                found.append(f"{path}:{line + m[0].count(chr(10), 0, w.start())}: comment: {w[0]}")
        bare = COMMENT.sub(lambda m: "" if m[0][0] == "/" else '""', text)
        for name in sorted(set(re.findall(r"\b[A-Za-z_]\w*\b", bare))):
            if NAMES.search(name):
                found.append(f"{path}: name: {name}")
        for m in TYPE.finditer(bare):
            name = m[1] or m[2]
            if types.setdefault(name, path) != path and not path.startswith("tests/"):
                found.append(f"{path}: type {name} is defined in {types[name]} too")
    if "--count" in sys.argv:
        words = collections.Counter((f.rsplit(": ", 1)[-1].lower(), "comment" if ": comment:" in f else "name") for f in found if "type" not in f)
        for folder in sorted(total):
            print(f"{folder:28} {begun[folder]:4} of {total[folder]:5} sentences, {100 * begun[folder] / total[folder]:.1f} %")
        for (w, kind), n in words.most_common(60):
            print(f"{kind:8} {w:28} {n}")
        print(*[f for f in found if ": type " in f], sep="\n")
        return 0
    for folder in sorted(total):
        if begun[folder] > SHARE * total[folder]:
            found += where[folder]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
