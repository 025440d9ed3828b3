#!/usr/bin/env python3
"""The way of one who prepares checkpoints: which schemes there are, a recipe, its mistakes, a plan, a conversion, a look at the result."""
import json
import os
import re
import shutil
import subprocess

BIN, TMP, DATA = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"], "tests/data"


def run(program, *args, status=0, **how):
    done = subprocess.run([f"{BIN}/{program}", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, **how)
    assert done.returncode == status, (program, args, done.returncode, done.stdout, done.stderr)
    return done


def refused(status, texts, program, *args, **how):
    """One line on stderr that holds all the texts."""
    done = run(program, *args, status=status, **how)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"{program}: error: E_"), done.stderr
    for text in [texts] if isinstance(texts, str) else texts:
        assert text in done.stderr, (text, done.stderr)
    return done.stderr


def convert(*args, **how):
    return run("minimax-convert", *args, **how)


def schemes():
    """--quant help, the help, the man page, the completions and the error name the same words."""
    table = convert("--quant", "help").stdout
    assert convert("--quant", "list").stdout == table
    named = re.findall(r"^(\w+) +(?:[\d.]+|-) +(?:[\d.]+|-)  \S", table, re.M)
    presets = re.findall(r"^(\w+) +.*\(.*; \*.experts.*\)$", table, re.M)
    assert len(named) == 15 and named[0] == "none" and "w4afp8" in named and len(presets) == 5, table
    for word in ("--help", "--help-man", "--help-bash", "--help-zsh", "--help-fish"):
        text = convert(word).stdout
        missing = [n for n in named + presets if not re.search(rf"\b{n}\b", text)]
        assert not missing, (word, missing)
    line = refused(2, "unknown scheme \"nvfp5\", expected one of none, ", "minimax-convert", f"{DATA}/tiny-m2", "--dry-run", "--quant", "nvfp5")
    assert all(n in line for n in named + presets)
    for how in (["--quant", "fp8"], ["--quant", "FP8"], ["--override", "*.experts.*=fp8"]):
        refused(2, ["block_fp8", "tensor_wise_fp8"], "minimax-convert", f"{DATA}/tiny-m2", "--dry-run", *how)
    # The page's table has the same figures.
    page = open("docs/quantisation.md").read()
    for name, bits, db in re.findall(r"^(\w+) +([\d.]+) +([\d.]+)  ", table, re.M):
        row = next(r for r in page.splitlines() if r.startswith("| ") and f"`{name}`" in r.split("|")[1])
        cells = [c.strip() for c in row.split("|")]
        assert cells[4] == bits and cells[5].split(",")[0] == db, (name, bits, db, row)


def recipes():
    """--print-recipe writes what --recipe reads, as the schema says; a pattern that matches nothing is an error."""
    options = ["--quant", "fp8_attention_int4_experts", "--ignore", "*.self_attn.o_proj.weight", "--search", "absmax", "--kv-scales", "f32"]
    text = convert(*options, "--print-recipe").stdout
    path = f"{TMP}/recipe.json"
    open(path, "w").write(text)
    recipe = json.loads(text)
    assert recipe == {"default": "block_fp8", "search": "absmax", "kv_scales": "f32",
                      "rules": [{"match": "*.experts.*", "scheme": "w4afp8"}, {"match": "*.self_attn.o_proj.weight", "scheme": "none"}]}
    assert convert("--recipe", path, "--print-recipe").stdout == text
    plans = [json.loads(convert(f"{DATA}/tiny-m2", "--dry-run", "--list", "--json", *how).stdout) for how in (options, ["--recipe", path])]
    assert plans[0]["tensors"] == plans[1]["tensors"] and "w4afp8" in {t["scheme"] for t in plans[0]["tensors"]}

    schema = json.load(open("docs/recipe.schema.json"))
    assert schema["additionalProperties"] is False and set(schema["properties"]) == set(recipe) and schema["required"] == ["default"]
    words = re.findall(r"^(\w+) +(?:[\d.]+|-) +(?:[\d.]+|-)  \S", convert("--quant", "help").stdout, re.M)
    assert schema["$defs"]["scheme"]["enum"] == words
    for key in ("search", "kv_scales"):
        for word in schema["properties"][key]["enum"]:
            json.dump({"default": "none", key: word}, open(path, "w"))
            assert json.loads(convert("--recipe", path, "--print-recipe").stdout)[key] == word
    json.dump({"default": "none", "extra": 1}, open(path, "w"))
    refused(3, "extra", "minimax-convert", "--recipe", path, "--print-recipe")

    for how in (["--ignore", "lm_haed"], ["--override", "re:^lm_haed=bf16"], ["--quant", "block_fp8; lm_haed=none"]):
        refused(2, ["lm_haed", "matches no tensor", "--allow-unmatched"], "minimax-convert", f"{DATA}/tiny-m2", "--dry-run", *how)
        convert(f"{DATA}/tiny-m2", "--dry-run", "--allow-unmatched", *how)
    # A pattern that a later one overrules has matched all the same.
    convert(f"{DATA}/tiny-m2", "--dry-run", "--override", "*.w1.weight=int8", "--override", "*.experts.*=bf16")


if __name__ == "__main__":
    for step in (schemes, recipes):
        step()
    print("schemes, recipes: as a user meets them")
