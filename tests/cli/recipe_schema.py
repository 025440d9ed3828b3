#!/usr/bin/env python3
"""Random recipe files: what docs/recipe.schema.json allows is taken and printed again as it was meant, what it does not is refused with one line
that names the file. Beyond the schema: schemes may be in capitals, and patterns have a syntax of their own (test_pattern.c)."""
import json
import os
import random
import re
import subprocess

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
SCHEMA = json.load(open("docs/recipe.schema.json", encoding="utf-8"))
TABLE = json.loads(subprocess.run([f"{BIN}/minimax-convert", "--quant", "help", "--json"], check=True, capture_output=True).stdout)
MEANING = {word: s["name"] for s in TABLE["schemes"] for word in [s["name"], *s["synonyms"]]}
PRESETS = [p["name"] for p in TABLE["presets"]]
KINDS = {"object": dict, "array": list, "string": str}
SAID = {"$schema", "$defs", "title", "description", "default"}  # nothing that is checked


def allows(schema, x):
    """The keywords that the schema uses, as JSON Schema 2020-12 defines them; another one is an error of this test."""
    for key, v in schema.items():
        if key == "$ref":
            ok = allows(SCHEMA["$defs"][v.removeprefix("#/$defs/")], x)
        elif key == "type":
            ok = isinstance(x, KINDS[v])
        elif key == "enum":
            ok = x in v
        elif key == "anyOf":
            ok = any(allows(s, x) for s in v)
        elif key == "not":
            ok = not allows(v, x)
        elif key == "required":
            ok = not isinstance(x, dict) or all(k in x for k in v)
        elif key == "additionalProperties":
            ok = v is False and (not isinstance(x, dict) or all(k in schema["properties"] for k in x))
        elif key == "properties":
            ok = not isinstance(x, dict) or all(allows(s, x[k]) for k, s in v.items() if k in x)
        elif key == "items":
            ok = not isinstance(x, list) or all(allows(v, i) for i in x)
        elif key == "maxItems":
            ok = not isinstance(x, list) or len(x) <= v
        elif key in ("minLength", "maxLength"):
            ok = not isinstance(x, str) or (len(x) >= v if key == "minLength" else len(x) <= v)
        elif key == "pattern":
            ok = not isinstance(x, str) or re.search(v, x) is not None
        else:
            assert key in SAID, key
            ok = True
        if not ok:
            return False
    return True


def take(path):
    done = subprocess.run([f"{BIN}/minimax-convert", "--recipe", path, "--print-recipe"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        assert done.returncode in (2, 3) and done.stderr.count("\n") == 1 and done.stdout == "" and "E_RECIPE" in done.stderr, done
        assert done.returncode == 2 or path in done.stderr, done.stderr
    return json.loads(done.stdout) if done.returncode == 0 else None


def meant(recipe):
    """As it is printed: every key, schemes by their names."""
    method = {"method": "gptq"} if recipe.get("method") == "gptq" else {}
    return {**method, "default": MEANING[recipe["default"]], "search": recipe.get("search", "mse"), "kv_scales": recipe.get("kv_scales", "keep"),
            "rules": [{"match": r["match"], "scheme": MEANING[r["scheme"]]} for r in recipe.get("rules", [])]}


def random_recipe(rng):
    """Usually right; now and then something of it is not."""
    wrong = ["", "fp8", "nvfp5", "none; *=bf16", "x=bf16", " int8", "int8 ", "int8;", 7, None, True, [], {"a": "none"}, "none\0", *PRESETS]
    odd = ["", "a;b", ";", "search", "method", "kv_scales", "nonfinite", "importance", "act_scales", " x", "x\t", "x\0", 3, None, ["x"], "y" * 513,
           "a; b=bf16"]
    fine = ["*", "*.w1.weight", "re:^lm_head|w[13]$", "a=b", "search=mse", "quo\"te", "model.layers.[0-9].*", "a b", "\u00e9\u4e16", "y" * 512, "importances",
            "none", "x\ny"]

    def scheme():
        return rng.choice(wrong) if rng.random() < 0.04 else rng.choice(sorted(MEANING))

    def rule():
        r = {"match": rng.choice(odd) if rng.random() < 0.05 else rng.choice(fine), "scheme": scheme()}
        if rng.random() < 0.02:
            del r[rng.choice(["match", "scheme"])]
        if rng.random() < 0.02:
            r["note"] = "x"
        return r if rng.random() > 0.02 else rng.choice(["*=bf16", None, [r]])

    recipe = {"default": scheme()}
    for key in ("search", "method", "kv_scales"):
        if rng.random() < 0.5:
            words = SCHEMA["properties"][key]["enum"]
            recipe[key] = rng.choice(words) if rng.random() < 0.95 else rng.choice(["", "MSE", "mse; *=bf16", "zero", 1, None, "keep "])
    if rng.random() < 0.8:
        recipe["rules"] = [rule() for _ in range(rng.randrange(6))]
    if rng.random() < 0.03:
        recipe[rng.choice(["rule", "importance", "", "nonfinite"])] = rng.choice(["zero", [], "a" * 64])
    if rng.random() < 0.02:
        del recipe["default"]
    return recipe if rng.random() > 0.01 else [recipe]


def options():
    """--ignore and --override give one rule each, or are refused; none is a setting or several rules."""
    for match in ("*", "a=b", "a b", "re:^w[13]$", "searches"):
        for option, word in ((["--ignore", match], "none"), (["--override", match + "=bf16"], "bf16")):
            done = subprocess.run([f"{BIN}/minimax-convert", "--quant", "int8", *option, "--print-recipe"], capture_output=True, check=True)
            assert json.loads(done.stdout)["rules"] == [{"match": match, "scheme": word}], (option, done.stdout)
    for match in ("a;b", "lm_head*=bf16; x", ";", "search", " method ", "kv_scales", "nonfinite", "importance", "act_scales"):
        for option in (["--ignore", match], ["--override", match + "=absmax"], ["--override", match + "=zero"]):
            done = subprocess.run([f"{BIN}/minimax-convert", "--quant", "int8", *option, "--print-recipe"], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (2, "") and f"{option[0]}: found" in done.stderr and "expected one pattern" in done.stderr, (option, done)
    for option in ("--ignore", b"a\xffb"), ("--override", b"\xc0\xaf=bf16"), ("--quant", b"int8; *\xed\xa0\x80=bf16"):
        done = subprocess.run([f"{BIN}/minimax-convert", *option, "--print-recipe"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "") and "expected UTF-8" in done.stderr, (option, done)


def same_conversion():
    """The recipe that options print gives the bytes of the options, and a pattern may name matrices of the experts one by one."""
    words = ["--quant", "int8", "--ignore", "lm_head*", "--override", r"re:[.]experts[.]\d+[.]w[13][.]weight$=channel_fp8", "--override", "*.layers.0.*experts.?.w2*=bf16"]
    printed = subprocess.run([f"{BIN}/minimax-convert", *words, "--print-recipe"], capture_output=True, check=True).stdout
    with open(f"{TMP}/printed.json", "wb") as f:
        f.write(printed)
    made = []
    for name, options in ("words", words), ("printed", ["--recipe", f"{TMP}/printed.json"]):
        subprocess.run([f"{BIN}/minimax-convert", "tests/data/tiny-m2", "-o", f"{TMP}/{name}", "-q", *options], check=True)
        made.append({n: open(f"{TMP}/{name}/{n}", "rb").read() for n in sorted(os.listdir(f"{TMP}/{name}"))})
    assert made[0] == made[1], [n for n in made[0] if made[0][n] != made[1].get(n)]
    schemes = {t["name"]: t["scheme"] for t in json.loads(made[0]["manifest.json"])["tensors"] if ".experts." in t["name"]}
    assert {n: s for n, s in schemes.items() if s != ("channel_fp8" if "w13" in n else "bf16" if ".0." in n else "int8")} == {}, schemes
    some = subprocess.run([f"{BIN}/minimax-convert", "tests/data/tiny-m2", "--dry-run", "--quant", "int8", "--override", "*experts.3.*=bf16"], capture_output=True, text=True, check=False)
    assert some.returncode == 2 and "E_RECIPE" in some.stderr and "expert 0 int8 and expert 3 bf16" in some.stderr, some


def same_plan():
    """A recipe has one plan however it is written: with its defaults or without, in another order, by synonyms, in a file. --resume takes each
    for the others."""
    int4 = next(word for word, name in MEANING.items() if name == "w4a16" and word != name)
    forms = [(["--quant", "nvfp4", "--search", "mse", "--method", "nearest", "--kv-scales", "keep", "--ignore", "*.layers.0.*proj*"],
              ["--quant", "NVFP4; *.layers.0.*proj* = None"], ["--quant", "nvfp4", "--override", "*.layers.0.*proj*=none"]),
             (["--quant", "int8", "--override", "*experts*w2*=nvfp4", "--search", "absmax", "--head", "block_fp8"],
              ["--quant", "int8; *experts*w2*=nvfp4; search=four_six; search=absmax; lm_head.weight=block_fp8"]),
             (["--quant", "none", "--kv-scales", "drop", "--allow-nonfinite"], ["--allow-nonfinite", "--quant", "none; kv_scales=drop"]),
             (["--quant", "experts_int4"], ["--quant", "none", "--override", f"*.experts.*={int4}", "--search", "mse"])]
    for number, (first, *others) in enumerate(forms):
        printed = subprocess.run([f"{BIN}/minimax-convert", *first, "--print-recipe"], capture_output=True, check=True).stdout
        with open(f"{TMP}/plan.json", "wb") as f:
            f.write(printed)
        from_file = ["--recipe", f"{TMP}/plan.json", *(["--allow-nonfinite"] if "--allow-nonfinite" in first else [])]
        convert = [f"{BIN}/minimax-convert", "tests/data/tiny-m2", "-o", f"{TMP}/plan{number}", "-q"]
        subprocess.run([*convert, *first], check=True)
        for words in (*others, from_file, [*from_file, "--kv-scales", json.loads(printed)["kv_scales"]]):
            done = subprocess.run([*convert, "--resume", *words], capture_output=True, text=True, check=False)
            assert done.returncode == 0, (words, done)


def main():
    listed = [s["enum"] for s in SCHEMA["$defs"]["scheme"]["anyOf"]]
    assert listed == [[s["name"] for s in TABLE["schemes"]], [w for s in TABLE["schemes"] for w in s["synonyms"]]], listed
    path, rng, counts = f"{TMP}/recipe.json", random.Random(18), {True: 0, False: 0}

    def hold(recipe, allowed):
        with open(path, "w", encoding="utf-8") as f:
            json.dump(recipe, f)
        got = take(path)
        assert got == (meant(recipe) if allowed else None), (recipe, got)
        counts[allowed] += 1

    for _ in range(150):
        recipe = random_recipe(rng)
        hold(recipe, allows(SCHEMA, recipe))
    for n in (1024, 1025):
        recipe = {"default": "none", "rules": [{"match": f"x{i}", "scheme": "f32"} for i in range(n)]}
        hold(recipe, allows(SCHEMA, recipe))
    assert min(counts.values()) > 30, counts
    with open(path, "w", encoding="utf-8") as f:
        json.dump({"default": "NVFP4", "rules": [{"match": "*", "scheme": "None"}]}, f)
    assert take(path)["default"] == "nvfp4" and take(path)["rules"][0]["scheme"] == "none"
    with open(path, "w", encoding="utf-8") as f:
        f.write('["int8"]')
    listed = subprocess.run([f"{BIN}/minimax-convert", "--recipe", path, "--print-recipe"], capture_output=True, text=True, check=False)
    assert listed.returncode == 3 and f"E_RECIPE: {path}: found a list, expected an object" in listed.stderr, listed
    options()
    same_conversion()
    same_plan()
    print(f"{counts[True]} random recipes that the schema allows were taken and printed as they were meant, {counts[False]} others refused")


if __name__ == "__main__":
    main()
