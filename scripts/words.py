#!/usr/bin/env python3
"""The language of the tree (CONTRIBUTING.md): one line per finding, exit status 1 if there is any. --count prints figures per folder instead.

Comments and pages (*.md): at most 2 in 100 sentences of a folder begin with What, Whether, Whoever, Those, Of, That, Nor or So. Words that the
field does not use, or uses for something else, stand neither in comments, pages and texts for users nor in names (BANNED, NAMES). No type mm_…
of the product is defined in two files.
EXCEPTIONS lists what is allowed all the same, with the reason."""
import collections
import os
import re
import subprocess
import sys

BEGINNING = re.compile(r"(What|Whether|Whoever|Those|Of|That|Nor|So)\b")
SHARE = 0.02
BANNED = re.compile(
    r"\b(copy engine|in vain|patience|whom|let down|hurt|mends?|mended|mending|heals?|healed|blames?|blamed|parcels?|rehears\w*|put off|luck|"
    r"apart|stretch|stretches|twins?|dialects?|spellings?|beside|told|tells?|waiters?|ask ahead|skinny)\b", re.I)
# Parts of names between underscores.
NAMES = re.compile(
    r"(?:^|_)(apart|hurt|vain|patience|whom|mend|heal|blame|parcel|rehears\w*|stretch|stretches|twin|luck|dialect|spelling|spellings|beside|told|tell|tells|skinny|ask|asks|asked|due|soon|sooner|seal|seals|sealed|sealing|world|worlds|why|room|rooms|waiter|waiters|whoever)(?:_|$)", re.I)
# The same in a folder: tokens are sampled there, and experts and blocks selected.
FOLDERS = {
    "runtime/engine/": re.compile(r"(?:^|_)(choose|choice|choices|chosen|chose|chooses)(?:_|$)", re.I),
}
for _folder in ("runtime/schedule/", "runtime/cuda/sampling/"):
    FOLDERS[_folder] = FOLDERS["runtime/engine/"]
# (file, word or name): why it stands there.
EXCEPTIONS = {
    ("formats/mpi.c", "MPI_COMM_WORLD"): "a name of MPI",
    ("runtime/engine/processes.c", "MPI_COMM_WORLD"): "a name of MPI",
    ("runtime/engine/engine_options.h", "choices"): "values of an option, as mm_option calls them",
    ("runtime/cuda/backend.h", "mm_backend"): "ops.h declares it; each backend defines its own, and no file includes both",
}
TYPE = re.compile(r"^(?:typedef )?(?:struct|enum|union) (mm_\w+) \{|^\} (mm_\w+);", re.M)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)\n]*\)|--[a-z-]+", re.S | re.M)  # of a page: blocks, spans, targets of links, options
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def sentences(comment):
    text = re.sub(r"^\s*(\*|//|/\*)+ ?", "", comment.removesuffix("*/"), flags=re.M)
    return [s for s in (p.strip() for p in re.split(r"(?<=[.:;!?])\s+|\n\s*\n", " ".join(text.split()))) if len(s.split()) > 1]


class Findings:
    def __init__(self):
        self.total, self.begun, self.begins = collections.Counter(), collections.Counter(), collections.defaultdict(list)
        self.found, self.words, self.types, self.used = [], collections.Counter(), {}, set()

    def add(self, path, line, kind, word, text):
        if (path, word) in EXCEPTIONS:
            self.used.add((path, word))
            return
        self.found.append(f"{path}:{line}: {text}")
        self.words[kind, word.lower()] += 1

    def comment(self, path, line, comment):
        folder = os.path.dirname(path) if not path.startswith("tests/") else "tests"
        for s in sentences(comment):
            self.total[folder] += 1
            if BEGINNING.match(s):
                self.begun[folder] += 1
                self.begins[folder].append(f"{path}:{line}: a sentence begins with {s.split()[0]}: {s[:70]}")
        for w in BANNED.finditer(comment):
            self.add(path, line + comment.count("\n", 0, w.start()), "comment", w[0], f"a comment says \"{w[0]}\"")

    def page(self, path):
        with open(path, encoding="utf-8") as f:
            text = CODE.sub(lambda m: "x" + "\n" * m[0].count("\n"), f.read())
        folder = os.path.dirname(path) + "/*.md"
        for part in re.split(r"\n\s*\n|\n(?=[-|#] )|\|", text):
            for s in sentences(part.lstrip("-#* ")):
                self.total[folder] += 1
                if BEGINNING.match(s):
                    self.begun[folder] += 1
                    self.begins[folder].append(f"{path}: a sentence begins with {s.split()[0]}: {s[:70]}")
        for w in BANNED.finditer(text):
            self.add(path, text.count("\n", 0, w.start()) + 1, "page", w[0], f"a page says \"{w[0]}\"")

    def file(self, path):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        for m in COMMENT.finditer(text):
            if m[0][0] == "/":
                self.comment(path, text.count("\n", 0, m.start()) + 1, m[0])
            elif not path.startswith("tests/"):
                for w in BANNED.finditer(CODE.sub("", m[0])):
                    if w[0].lower() != "dialect":  # an option's name and its values' kind
                        self.add(path, text.count("\n", 0, m.start()) + 1, "text", w[0], f"a text says \"{w[0]}\"")
        bare = COMMENT.sub(lambda m: "\n" * m[0].count("\n") if m[0][0] == "/" else '""', text)
        seen = set()
        for m in re.finditer(r"\b[A-Za-z_]\w*\b", bare):
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", m[0])
            if m[0] not in seen and (NAMES.search(name) or any(path.startswith(f) and w.search(name) for f, w in FOLDERS.items())):
                self.add(path, bare.count("\n", 0, m.start()) + 1, "name", m[0], f"a name is {m[0]}")
            seen.add(m[0])
        for name, at in {m[1] or m[2]: m.start() for m in TYPE.finditer(bare)}.items():
            if not path.startswith("tests/") and self.types.setdefault(name, path) != path:
                self.add(path, bare.count("\n", 0, at) + 1, "type", name, f"type {name} is defined in {self.types[name]} too")


def main():
    os.chdir(os.path.join(os.path.dirname(__file__), ".."))
    f = Findings()
    for path in subprocess.check_output(["git", "ls-files", "*.c", "*.h", "*.cu", "*.cuh"], text=True).split():
        if os.path.exists(path):
            f.file(path)
    for path in subprocess.check_output(["git", "ls-files", "*.md"], text=True).split():
        if os.path.exists(path):
            f.page(path)
    if "--count" in sys.argv:
        for folder in sorted(f.total):
            print(f"{folder:28} {f.begun[folder]:4} of {f.total[folder]:5} sentences, {100 * f.begun[folder] / f.total[folder]:.1f} %")
        for (kind, w), n in f.words.most_common():
            print(f"{kind:8} {w:28} {n}")
        return 0
    found = f.found + [line for folder in sorted(f.total) if f.begun[folder] > SHARE * f.total[folder] for line in f.begins[folder]]
    found += [f"scripts/words.py: the exception for {word} in {path} is not needed" for path, word in EXCEPTIONS
              if (path, word) not in f.used and os.path.exists(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
