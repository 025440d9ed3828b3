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


def sources():
    """What is given instead of a source's directory: a folder of the Hub's cache is read, all else says what to do."""
    source, cache = os.path.abspath(f"{DATA}/tiny-m2"), f"{TMP}/models--org--tiny"
    plan = convert(source, "--dry-run", "--json").stdout
    os.makedirs(f"{cache}/refs")
    for revision in ("0123abcd", "4567ef"):
        shutil.copytree(source, f"{cache}/snapshots/{revision}")
    refused(3, ["2 snapshots", "refs/main"], "minimax-convert", cache, "--dry-run")
    open(f"{cache}/refs/main", "w").write("4567ef")
    os.remove(f"{cache}/snapshots/0123abcd/config.json")
    assert convert(cache, "--dry-run", "--json").stdout == plan
    shutil.rmtree(f"{cache}/snapshots/0123abcd")
    os.remove(f"{cache}/refs/main")
    assert convert(cache, "--dry-run", "--json").stdout == plan  # the only one

    fetch = "hf download MiniMaxAI/MiniMax-M2 --local-dir MiniMax-M2"
    for word in ("MiniMaxAI/MiniMax-M2", "https://huggingface.co/MiniMaxAI/MiniMax-M2", "https://huggingface.co/MiniMaxAI/MiniMax-M2/tree/main"):
        refused(3, fetch, "minimax-convert", word, "--dry-run")
    assert "hf download" not in refused(3, "no such directory", "minimax-convert", f"{TMP}/absent/deep/path", "--dry-run")
    refused(3, "E_FS_TYPE", "minimax-convert", f"{source}/config.json", "--dry-run")

    convert(source, "-o", f"{TMP}/packed", "-q")
    refused(3, ["E_KIND", "packed", "minimax-inspect"], "minimax-convert", f"{TMP}/packed", "--dry-run")
    for program, more in (("minimax-run", ["-p", "x"]), ("minimax-verify", []), ("minimax-eval", ["--ids", f"{source}/held-out-ids.json"])):
        for word in (source, cache):
            refused(3, ["E_KIND", "minimax-convert SRC -o DIR"], program, word, *more)

    shutil.copytree(source, f"{TMP}/light")
    for name in os.listdir(f"{TMP}/light"):
        if re.match(r"model-.*\.safetensors$", name):
            os.remove(f"{TMP}/light/{name}")
    refused(3, ["model-00001", "--names-only"], "minimax-convert", f"{TMP}/light", "--dry-run")
    assert "--names-only" not in refused(3, "model-00001", "minimax-convert", f"{TMP}/light", "-o", f"{TMP}/none")
    assert json.loads(convert(f"{TMP}/light", "--dry-run", "--names-only", "--json").stdout)["output_bytes"] == json.loads(plan)["output_bytes"]

    config = json.load(open(f"{source}/config.json")) | {"num_experts_per_tok": 99}
    json.dump(config, open(f"{TMP}/light/config.json", "w"))
    refused(3, "num_experts_per_tok: found 99, expected 1 to 8", "minimax-convert", f"{TMP}/light", "--dry-run", "--names-only")


def device():
    """A build without CUDA says so; one with it, on a machine without a GPU, names the driver."""
    line = run("minimax-run", f"{TMP}/packed", "-p", "x", "--device", "cuda", "-n", 1, status=4).stderr
    assert "this build has no CUDA backend" in line or "E_CUDA" in line, line


if __name__ == "__main__":
    for step in (schemes, recipes, sources, device):
        step()
    print("schemes, recipes, sources, devices: as a user meets them")
