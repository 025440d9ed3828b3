#!/usr/bin/env python3
"""Limits of size in the source tree, read without a compiler: fields of a struct, lines of a function, parameters of a function. Prints how
many are above each; exit status 1 if one is that OVER does not list, or one that it lists no longer is. --list prints them all."""
import os
import re
import sys

FIELDS, LINES, PARAMETERS = 40, 60, 8
LAYERS = "formats", "quant", "loader", "convert", "runtime"
# Above a limit today: "file:name". Phases of a kernel are read from top to bottom; none is to be added.
OVER = {
    "fields": set(),
    "lines": {
        "runtime/cuda/attention/gqa_decode.cu:one_split",
        "runtime/cuda/attention/gqa_hopper.cu:consume",
        "runtime/cuda/attention/gqa_hopper.cu:produce",
        "runtime/cuda/attention/gqa_prefill.cu:gqa_tile",
        "runtime/cuda/attention/rope.cu:rope",
        "runtime/cuda/gemm/gemv.cuh:gemv_add",
        "runtime/cuda/gemm/small_batch_rows.cuh:multiply_box",
        "runtime/cuda/lightning/lightning_prefill.cu:lightning_span",
    },
    "parameters": set(),
}
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:[^\n\\]|\\\n|\\.)*', re.S | re.M)
FUNCTION = re.compile(r"\)\s*(?:const|noexcept|override|\s)*$")


def code(text):
    """The text without comments, strings, characters and directives; every line where it was."""
    return TOKEN.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", " ", text))


def outermost(text, open_, close):
    """Where the last outermost parentheses of the text begin and end."""
    depth, end = 0, text.rfind(close)
    for i in range(end, -1, -1):
        depth += (text[i] == close) - (text[i] == open_)
        if depth == 0:
            return i, end
    return 0, end


def listed(text):
    """How many the text lists, by commas outside all brackets."""
    depth = commas = 0
    for c in text:
        depth += (c in "([{<") - (c in ")]}>")
        commas += c == "," and depth == 0
    return commas + 1 if text.strip() not in ("", "void") else 0


def declared(text):
    """How many fields a member's declaration declares."""
    text = text.strip()
    if not text or re.match(r"(static|using|typedef|template|friend|struct \w+$|enum)\b", text):
        return 0
    if "(" in text:
        return "(*" in text  # a pointer to a function, or a function
    return listed(re.sub(r"=.*", "", text, flags=re.S))


def measure(path, text):
    """(limit, value, name) of each struct and function of the file."""
    found, level, since = [], [], 0
    i, n = 0, len(text)
    while i < n:
        c = text[i]
        if c == "{":
            head = text[since:i]
            if FUNCTION.search(head) and "=" not in head.split("(")[0]:
                first, last = outermost(head, "(", ")")
                name = (re.findall(r"[\w~]+|operator\W+$", head[:first]) or ["?"])[-1]
                end, depth = i, 0
                while end < n:
                    depth += (text[end] == "{") - (text[end] == "}")
                    if depth == 0:
                        break
                    end += 1
                found.append(("lines", text.count("\n", i, end) + 1, name))
                found.append(("parameters", listed(head[first + 1:last]), name))
                i = since = end
            elif re.search(r"\b(struct|union|class|namespace|extern)\b", head) and "=" not in head:
                kind = re.search(r"\b(struct|union|class)\s+(?:__\w+(?:\([^)]*\))?\s+)?(\w*)", head)
                level.append([kind.group(2) if kind else None, 0, bool(re.search(r"\b(struct|union|class)\b", head))])
                since = i + 1
            else:
                depth = 0
                while i < n:
                    depth += (text[i] == "{") - (text[i] == "}")
                    if depth == 0:
                        break
                    i += 1
        elif c == "}" and level:
            name, fields, is_struct = level.pop()
            after = re.match(r"\s*(\w*)", text[i + 1:]).group(1)
            if is_struct:
                found.append(("fields", fields, name or after or "?"))
                if level and not name and not after:
                    level[-1][1] += fields
            since = i + 1
        elif c == ";":
            if level:
                level[-1][1] += declared(text[since:i])
            since = i + 1
        i += 1
    return [(limit, value, f"{path}:{name}") for limit, value, name in found]


def main():
    most = {"fields": FIELDS, "lines": LINES, "parameters": PARAMETERS}
    over = {limit: {} for limit in most}
    for layer in LAYERS:
        for folder, _, files in os.walk(layer):
            for name in files:
                if not name.endswith((".c", ".h", ".cu", ".cuh")):
                    continue
                with open(f"{folder}/{name}", encoding="utf-8") as f:
                    for limit, value, where in measure(f"{folder}/{name}", code(f.read())):
                        if value > most[limit]:
                            over[limit][where] = max(value, over[limit].get(where, 0))
    bad = [f"{where}: {over[limit][where]} {limit}, at most {most[limit]}" for limit in most for where in sorted(over[limit])
           if where not in OVER[limit]]
    bad += [f"scripts/limits.py: {where} is within its limit of {limit}" for limit in most for where in sorted(OVER[limit])
            if where not in over[limit] and os.path.exists(where.split(":")[0])]
    if "--list" in sys.argv:
        print(*(f"{over[limit][where]} {limit} {where}" for limit in most for where in sorted(over[limit])), sep="\n")
    print(*bad or [", ".join(f"{len(over[limit])} over {most[limit]} {limit}" for limit in most)], sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
