#!/usr/bin/env python3
"""Writes pairs.json, a tokenizer that shows every split, and cases.json, what the PyPI package tokenizers makes of some texts.

usage: make.py [MERGES.TXT]   with the package tokenizers (0.23.3) installed; MERGES.TXT of MiniMax-M1 adds that tokenizer's ids
"""
import json, os, random, sys
from tokenizers import Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))

# One character or two of each kind that the split pattern tells apart. pairs.json merges any two of them, so a piece that begins or
# ends elsewhere has other ids.
KINDS = ["a", "t", "A", "T", "1", "٣", "½", " ", "\u3000", "\u180e", "\n", "\r", "\t", "'", "ſ", "!", "/", "<", "é", "ǅ", "ʰ", "中", "\u0301", "😀"]


def alphabet():
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in own]
    return {**{b: chr(b) for b in own}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def spell(text):
    letter = alphabet()
    return "".join(letter[b] for b in text.encode())


def document(merges, added):
    """A tokenizer.json around merges ("a b"): ids of the bytes in order, then of the merges, then of the added tokens."""
    vocab = [alphabet()[b] for b in range(256)] + [m.replace(" ", "") for m in merges]
    doc = json.load(open(f"{HERE}/../tiny-m1/tokenizer.json"))
    doc["model"]["vocab"] = {token: i for i, token in enumerate(vocab)}
    doc["model"]["merges"] = merges
    doc["added_tokens"] = [
        {"id": len(vocab) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": special}
        for i, (text, normalized, special) in enumerate(added)
    ]
    return doc


def pair_merges():
    merges = []
    for kind in KINDS:
        letters = spell(kind)
        for i in range(1, len(letters)):
            merge = f"{letters[:i]} {letters[i]}"
            if merge not in merges:
                merges.append(merge)
    pairs = [f"{spell(x)} {spell(y)}" for x in KINDS for y in KINDS]
    random.Random(1).shuffle(pairs)
    return merges + pairs


# (text, normalized, special): longer and shorter, overlapping, of both levels
ADDED = [("<a>", False, True), ("<a><t", False, True), ("t<a", False, False), ("A!t", True, False), ("!A!A", True, True), ("!<!", True, False)]

TEXTS = [
    "", "a", " ", "\n", "In the beginning God created the heaven and the earth.", "And the LORD said unto Moses, Go",
    "And God said, Let there be light: and there was light.\n4 And God saw", "don't DON'T Don'T I'M we'll WE'LL you've they'd it's IT'S 're 'rE",
    "'s", "''s", "a'ſ", "O'Neil's o'clock'tis", "1 12 123 1234 12345 123456789", "3.14159 1,000,000 0x7f 2^40", "١٢٣٤٥ ½¾ Ⅷ ²³",
    " leading", "  two", "   three", "trailing ", "trailing  ", "a  b   c    d", "\t\ttabs\t", "line\nline\n\nline\r\n\r\nend", "   \n   \n  x",
    "\u00a0nbsp\u3000ideographic\u2003em\u180emongolian\u0085next", "foo/bar//baz\\qux", "!!!\n\n///\r\nnext", "#include <stdio.h>\nint main(void) { return 0; }\n",
    "https://example.org/a?b=c&d=%20#e", "{\"key\": [1, 2.5e-3, null]}", "CamelCaseWords HTTPServer iPhone XMLHttpRequest", "ДокументПродажиТоваров Ελληνικά",
    "中文分词测试，没有空格。", "日本語のテキスト、カタカナ", "한국어 텍스트입니다", "ไทยไม่มีช่องว่าง", "العربية من اليمين", "हिन्दी में पाठ", "Ǆ ǅ ǆ ᾈ",
    "e\u0301a\u0300 \u0301alone", "😀 👩‍👩‍👧 🇫🇷 ❤️", "a😀b 😀😀", "naïve café Straße İstanbul", "ʰʰ aʰ Aʰ", "x\u200by\ufeffz", "\x00\x01\x7f", "a\x00b",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAb", " " * 40 + "x",
    "<begin_of_document><beginning_of_sentence>user name=user\nHi<end_of_sentence>\n", "]~!b[]~b]user\nHi[e~[\n]~b]ai\n<think>\nwhy</think>",
    "]~b]!p~[ ]~b]~!b[", "<<a><t<a>>t<a><t", "t<a!A!A!<a>A!<!", "!A!A!A!!<!A!t", "A!t<a A!t !A!A!t<a", "<a><a><t<a>", "a<end_of_sentence>!<a>\n<think>",
]


def main():
    json.dump(document(pair_merges(), ADDED), open(f"{HERE}/pairs.json", "w"), ensure_ascii=False, indent=0)
    files = {name: open(f"{HERE}/../{path}").read() for name, path in
             [("tiny-m1", "tiny-m1/tokenizer.json"), ("tiny-m2", "tiny-m2/tokenizer.json"), ("pairs", "tokenizer/pairs.json")]}
    if len(sys.argv) > 1:
        merges = open(sys.argv[1], encoding="utf-8").read().splitlines()[1:]
        files["minimax-m1"] = json.dumps(document(merges, []))
    rng = random.Random(2)
    texts = TEXTS + ["".join(rng.choice(KINDS) for _ in range(rng.randint(3, 40))) for _ in range(30)]
    cases = []
    for added in (False, True):
        ids = {}
        for name, text in files.items():
            tokenizer = Tokenizer.from_str(text)
            if not added:  # the package always looks for added tokens: give it none
                tokenizer = Tokenizer.from_str(json.dumps({**json.loads(text), "added_tokens": []}))
            ids[name] = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        cases += [{"text": t, "added": added, **{name: ids[name][i] for name in files}} for i, t in enumerate(texts) if not added or "[" in t or "<" in t or "!" in t]
    with open(f"{HERE}/cases.json", "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(c, ensure_ascii=False, separators=(",", ":")) for c in cases) + "\n]\n")
    print(len(cases), "cases")


main()
