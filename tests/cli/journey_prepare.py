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
    assert len(named) == 21 and named[0] == "none" and "w4afp8" in named and len(presets) == 7, table
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
    """--print-recipe writes what --recipe reads (recipe_schema.py holds it to its schema); a pattern that matches nothing is an error."""
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

    json.dump({"default": "none", "extra": 1}, open(path, "w"))
    refused(3, "extra", "minimax-convert", "--recipe", path, "--print-recipe")

    for how in (["--ignore", "lm_haed"], ["--override", "re:^lm_haed=bf16"], ["--quant", "block_fp8; lm_haed=none"]):
        refused(2, ["lm_haed", "matches no tensor", "--allow-unmatched"], "minimax-convert", f"{DATA}/tiny-m2", "--dry-run", *how)
        convert(f"{DATA}/tiny-m2", "--dry-run", "--allow-unmatched", *how)
    # A pattern that a later one overrules has matched all the same.
    convert(f"{DATA}/tiny-m2", "--dry-run", "--override", "*.w1.weight=int8", "--override", "*.experts.*=bf16")


def hub_names(source):
    """ORG/NAME is the source in the Hub's cache, wherever a variable puts that; what is absent has the command that fetches it."""
    org, absent = "MiniMaxAI/MiniMax-M2", {"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "", "HF_HOME": "", "XDG_CACHE_HOME": "", "HOME": f"{TMP}/nobody"}
    fetch, want = "hf download MiniMaxAI/MiniMax-M2\n", convert(source, "--dry-run").stdout
    for i, (variables, below) in enumerate((({"HF_HUB_CACHE": f"{TMP}/at0", "HF_HOME": f"{TMP}/never"}, ""), ({"HUGGINGFACE_HUB_CACHE": f"{TMP}/at1"}, ""),
                                            ({"HF_HOME": f"{TMP}/at2"}, "/hub"), ({"XDG_CACHE_HOME": f"{TMP}/at3"}, "/huggingface/hub"),
                                            ({"HOME": f"{TMP}/at4"}, "/.cache/huggingface/hub"), ({"HF_HOME": "~/at5", "HOME": TMP}, "/hub"))):
        env = {**os.environ, **absent, **variables}
        for word in (org, f"https://huggingface.co/{org}", f"https://huggingface.co/{org}/tree/main", f"hf://{org}"):
            assert fetch in refused(3, f"into its cache {TMP}/at{i}{below}: ", "minimax-convert", word, "--dry-run", env=env)
        cache = f"{TMP}/at{i}{below}/models--MiniMaxAI--MiniMax-M2"
        shutil.copytree(source, f"{cache}/snapshots/5eed")
        os.mkdir(f"{cache}/refs")
        open(f"{cache}/refs/main", "w").write("5eed")
        for word in (org, f"https://huggingface.co/{org}", f"https://huggingface.co/{org}/tree/main", f"hf://{org}"):
            done = convert(word, "--dry-run", env=env)
            assert done.stdout == want and f"source: {cache}/snapshots/5eed\n" in done.stderr, done
    packed = f"{TMP}/of-hub"
    convert(org, "-o", packed, "-q", "--quant", "block_fp8", env=env)
    run("minimax-verify", packed, "--source", org, env=env)
    assert " tensors" in run("minimax-inspect", org, "--summary", env=env).stdout
    refused(3, "the Hugging Face Hub's cache has a source of this name: convert it first: minimax-convert MiniMaxAI/MiniMax-M2 -o DIR", "minimax-run", org, "-p", "x", env=env)
    for word in (f"{org}@main", "MiniMaxAI/MiniMax-M1", "MiniMaxAI", "./" + org, f"{TMP}/{org}", "MiniMaxAI/../MiniMax-M2"):
        refused(3, "no such directory", "minimax-convert", word, "--dry-run", env=env)
    for word in (f"https://huggingface.co/{org}/blob/main/config.json", f"hf://{org}@main", f"hf://{org}@main/config.json", f"hf.co/{org}?revision=main",
                 f"https://huggingface.co/{org}/discussions/2", f"http://hf.co/{org}", f"http://huggingface.co/{org}/", f"{org}/", f"{org}//"):
        assert convert(word, "--dry-run", env=env).stdout == want, word
    for kind in ("datasets", "spaces", "collections"):
        for host in ("https://huggingface.co", "http://hf.co", "hf:/"):
            line = refused(3, [f"one of the Hugging Face Hub's {kind}, expected that of a model"], "minimax-convert", f"{host}/{kind}/{org}", "--dry-run", env=env)
            assert "hf download" not in line, line
    # Another revision is never read as main, however the address names it.
    for rest in ("/tree/v2.1", "/blob/v2.1/config.json", "/resolve/v2.1/config.json?download=true", "/raw/v2.1/config.json", "/commit/v2.1", "/commits/v2.1",
                 "/blame/v2.1/config.json", "/edit/v2.1/config.json", "/delete/v2.1/config.json", "/upload/v2.1", "/new/v2.1",
                 "@v2.1", "@v2.1/config.json", "?revision=v2.1", "/resolve/config.json?download=true&revision=v2.1#top"):
        line = refused(3, "no such directory", "minimax-convert", f"https://huggingface.co/{org}{rest}", "--dry-run", env=env)
        assert "hf download MiniMaxAI/MiniMax-M2 --revision v2.1, " in line, line
    for rest in ("/tree/v2.1", "/resolve/v2.1/config.json", "@v2.1/config.json"):
        assert "--revision v2.1, " in refused(3, "no such directory", "minimax-convert", f"hf://{org}{rest}", "--dry-run", env=env), rest
    # Nor is a folder of main read as its root.
    for rest in ("/tree/main/fp8", "/tree/main/fp8/", "/blob/main/fp8/config.json", "/resolve/main/fp8/config.json?download=true", "@main/fp8", "@main/fp8/config.json", "hf:/fp8",
                 "/blame/main/fp8/config.json"):
        word = f"hf://{org}{rest[3:]}" if rest.startswith("hf:") else f"https://huggingface.co/{org}{rest}"
        line = refused(3, "no such directory", "minimax-convert", word, "--dry-run", env=env)
        assert "the folder \"fp8\" of a repository" in line and "hf download MiniMaxAI/MiniMax-M2, " in line, line
    for rest, folder in (("/v1.0", "v1.0"), ("@main/M2.5-FP8", "M2.5-FP8"), ("/v1.beta/", "v1.beta"), ("/v1.0/config.json", "v1.0"), ("@main/a/v1.0?x=1.json", "a/v1.0")):
        line = refused(3, "no such directory", "minimax-convert", f"hf://{org}{rest}", "--dry-run", env=env)
        assert f'the folder "{folder}" of a repository' in line, line
    line = refused(3, "no such directory", "minimax-convert", f"hf://{org}@refs/pr/1", "--dry-run", env=env)
    assert "hf download MiniMaxAI/MiniMax-M2 --revision refs/pr/1, " in line, line
    for slash in ("%2F", "%2f"):  # as the Hub's own pages write it; hf download would encode the % again
        line = refused(3, "no such directory", "minimax-convert", f"https://huggingface.co/{org}/tree/refs{slash}pr{slash}1", "--dry-run", env=env)
        assert "hf download MiniMaxAI/MiniMax-M2 --revision refs/pr/1, " in line, line
    # A download that goes on: what is absent is named, with the command that fetches it.
    shard = sorted(n for n in os.listdir(source) if n.endswith(".safetensors"))[-1]
    os.remove(f"{cache}/snapshots/5eed/{shard}")
    refused(3, [shard, "1 are missing", "; hf download MiniMaxAI/MiniMax-M2 fetches the rest"], "minimax-convert", org, "-o", f"{TMP}/never", env=env)
    for name in (shard, "config.json", "model.safetensors.index.json"):  # a link whose blob did not come
        at, held = f"{cache}/snapshots/5eed/{name}", f"{TMP}/held"
        if name != shard:
            shutil.move(at, held)
        os.symlink("../../blobs/absent", at)
        for word in (org, f"{cache}/snapshots/5eed"):
            how = ["1 are missing"] if name == shard else []
            refused(3, [name, "hf download MiniMaxAI/MiniMax-M2 fetches the rest", *how], "minimax-convert", word, "-o", f"{TMP}/never", env=env)
        os.remove(at)
        if name != shard:
            shutil.move(held, at)
    os.remove(f"{cache}/snapshots/5eed/config.json")
    refused(3, ["found no config.json; hf download MiniMaxAI/MiniMax-M2 fetches the rest"], "minimax-convert", org, "--dry-run", env=env)


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
    for named in ("0123abcd", "0123abcd\n", "", "../../elsewhere", "4567e", "4567eF", "4567ef\0x", "4567ef\n0123abcd"):  # nor is the one snapshot taken for another
        open(f"{cache}/refs/main", "w").write(named)
        refused(3, ["E_FS_MISSING", "refs/main", "of which there is no snapshot"], "minimax-convert", cache, "--dry-run")
    open(f"{cache}/refs/main", "w").write("4567ef\n")
    assert convert(cache, "--dry-run", "--json").stdout == plan
    os.remove(f"{cache}/refs/main")
    assert convert(cache, "--dry-run", "--json").stdout == plan  # the only one

    # Shards or the index are missing: how many, and what lies there.
    part = f"{TMP}/part"
    shutil.copytree(source, part)
    shards = sorted(n for n in os.listdir(part) if "-of-" in n)
    os.remove(f"{part}/model.safetensors.index.json")
    refused(3, ["E_FS_MISSING", f"{len(shards)} weight files, first {shards[0]}", "fetch the index"], "minimax-convert", part, "--dry-run")
    for name in [*shards, "golden.safetensors"]:
        os.remove(f"{part}/{name}")
    refused(3, ["E_FS_MISSING", "found no weight file, expected this index or model.safetensors"], "minimax-convert", part, "-o", f"{TMP}/never")
    shutil.copy(f"{source}/model.safetensors.index.json", part)
    refused(3, ["E_FS_MISSING", shards[0], f"of {len(shards)} files that the index names, {len(shards)} are missing"], "minimax-convert", part, "-o", f"{TMP}/never")
    shutil.copy(f"{source}/{shards[0]}", part)
    refused(3, ["E_FS_MISSING", shards[1], f"of {len(shards)} files that the index names, 1 are missing", "--names-only"], "minimax-convert", part, "--dry-run")
    # A source without tokenizer or template converts, and a note says what the output lacks.
    shutil.copy(f"{source}/{shards[1]}", part)
    os.remove(f"{part}/tokenizer.json")
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        if os.path.exists(f"{part}/{name}"):
            os.remove(f"{part}/{name}")
    for name in ("tokenizer.json", "chat_template.jinja"):  # empty files are as good as none
        open(f"{part}/{name}", "w").close()
    said = convert(part, "--dry-run").stderr
    assert "note: the source has no tokenizer.json" in said and "note: the source has no chat template" in said, said
    for name in ("tokenizer.json", "chat_template.jinja"):
        os.remove(f"{part}/{name}")
    for more in (["--dry-run"], ["-o", f"{TMP}/bare"]):
        said = convert(part, *more).stderr
        assert "note: the source has no tokenizer.json" in said and "note: the source has no chat template" in said, said
    open(f"{part}/tokenizer_config.json", "w").write('{"chat_template": "x"}')
    assert "chat template" not in convert(part, "--dry-run").stderr
    assert "note:" not in convert(part, "--dry-run", "-q").stderr
    # So does one whose tokenizer or settings the runtime does not read: the note comes before the weights are read, and once.
    refuse = "note: %s will refuse the output: "
    settings = f"{refuse}%s: {part}/generation_config.json: "
    ends, defaults, chats = ("minimax-run (without --ignore-eos) and minimax-serve", "minimax-run --chat and minimax-serve (without --ignore-generation-config)",
                             "minimax-run --chat and minimax-serve (without --chat-format)")
    for name, text, said in (("tokenizer.json", "{", "note: the output will take no text, only ids: E_JSON: tokenizer.json: offset 1"),
                             ("generation_config.json", '{"temperature": 1,', settings % (ends, "E_JSON")),
                             ("generation_config.json", '{"eos_token_id": "x"}', settings % (ends, "E_CFG_RANGE") + "eos_token_id"),
                             ("generation_config.json", '{"top_k": 2.0}', settings % (defaults, "E_CFG_TYPE")),
                             ("generation_config.json", '{"top_p": 2}', settings % (defaults, "E_CFG_RANGE") + "top-p: found 2"),
                             ("tokenizer_config.json", '{"chat_template": ', refuse % chats + f"E_JSON: {part}/tokenizer_config.json: offset"),
                             ("generation_config.json", '{"eos_token_id": [1, 2], "temperature": 0.5}', None)):
        open(f"{part}/{name}", "w").write(text)
        for more in (["--dry-run"], ["-o", f"{TMP}/odd", "--force"]):
            lines = [line for line in convert(part, *more).stderr.splitlines() if re.match("note: .*the output", line) and "no tokenizer.json" not in line]
            assert [line.startswith(str(said)) for line in lines] == [True] * bool(said), (name, text, more, lines)
        os.remove(f"{part}/{name}")
    # A file of templates in which none stands that chats take gives none.
    for name, text in (("tokenizer_config.json", '{"chat_template": [{"name": "tool_use", "template": "x"}]}'), ("tokenizer_config.json", '{"chat_template": 5}'),
                       ("chat_template.json", "{}"), ("chat_template.json", '{"chat_template": ""}')):
        open(f"{part}/{name}", "w").write(text)
        assert "note: the source has no chat template" in convert(part, "--dry-run").stderr, (name, text)
        os.remove(f"{part}/{name}")
    # A template is known by its digest.
    for name, text, unknown in (("chat_template.jinja", "x", True), ("tokenizer_config.json", '{"chat_template": "x"}', True),
                                ("chat_template.json", '{"chat_template": [{"name": "default", "template": "x"}]}', True), ("tokenizer_config.json", "{}", False)):
        open(f"{part}/{name}", "w").write(text)
        for more in (["--dry-run"], ["-o", f"{TMP}/odd", "--force"]):
            assert (f"note: the template of {name} is none that is known: chats will need --chat-format" in convert(part, *more).stderr) == unknown, (name, text)
        os.remove(f"{part}/{name}")

    hub_names(source)
    fetch = "hf download MiniMaxAI/MiniMax-M2"
    assert "hf download" not in refused(3, "no such directory", "minimax-convert", f"{TMP}/absent/deep/path", "--dry-run")
    refused(3, "E_FS_TYPE", "minimax-convert", f"{source}/config.json", "--dry-run")

    convert(source, "-o", f"{TMP}/packed", "-q")
    assert "--tp 2" in convert(f"{TMP}/packed", "--tp", 2, "--dry-run").stdout  # it is a source too (reshard.py)
    ids = f"{source}/held-out-ids.json"
    for program, more in (("minimax-run", ["-p", "x"]), ("minimax-serve", []), ("minimax-verify", []), ("minimax-eval", ["--ids", ids])):
        refused(3, "absent: no such directory", program, f"{TMP}/absent", *more)
        refused(3, ["E_FS_TYPE", "expected the directory of a packed checkpoint"], program, ids, *more)
        refused(3, [fetch + ", then convert it: minimax-convert MiniMaxAI/MiniMax-M2 -o DIR"], program, "MiniMaxAI/MiniMax-M2", *more)
        for word in (source, cache):
            refused(3, ["E_KIND", "minimax-convert SRC -o DIR"], program, word, *more)

    for text in ("", "5", '"x"', "{}"):
        open(f"{TMP}/odd.json", "w").write(text)
        refused(3, ["E_IDS", "expected a list of ids"] if text == "{}" else ["E_JSON", "expected an array"], "minimax-eval", f"{TMP}/packed", "--ids", f"{TMP}/odd.json")
    refused(3, ["E_IDX", "by the types of the released model; without --names-only"], "minimax-convert", "tests/data/tiny-m1", "--dry-run", "--names-only")  # routers in BF16
    refused(2, "--source goes with --level source alone", "minimax-verify", f"{TMP}/packed", "--source", source, "--level", "header")
    refused(2, "--level source goes with --source SRC", "minimax-verify", f"{TMP}/packed", "--level", "source")
    refused(2, "--window and --limit: only with", "minimax-eval", f"{TMP}/packed", "--ids-from", "x", "--logits", f"{TMP}/y", "--limit", 3)

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
    with_cuda = b"cudaGetDevice" in open(shutil.which("minimax-run"), "rb").read()
    line = run("minimax-run", f"{TMP}/packed", "-p", "x", "--device", "cuda", "-n", 1, status=5 if with_cuda else 4).stderr
    assert ("E_CUDA: found no NVIDIA driver" if with_cuda else "this build has no CUDA backend") in line, line


def plan():
    """GiB beside bytes, equal ranks on one line, what they hold, KV bytes of a token, and whether GPUs of a size hold them."""
    source = f"{DATA}/tiny-m1"
    text = convert(source, "--dry-run", "--tp", 4).stdout
    whole = json.loads(convert(source, "--dry-run", "--tp", 4, "--json").stdout)
    assert f"{whole['output_bytes']} bytes (13.11 MiB) in all" in text and text.count("\n") == 3 and "  ranks 0-3: " in text, text
    config = json.load(open(f"{source}/config.json"))
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    full = sum(config["attn_type_list"])
    for tp, pp in ((1, 1), (4, 1), (4, 2), (8, 1)):
        p = json.loads(convert(source, "--dry-run", "--tp", tp, "--pp", pp, "--json", "--list").stdout)
        for key, kind in (("experts", ".experts."), ("attention", ".self_attn.")):
            listed = sum(t["bytes"] for t in p["tensors"] if kind in t["name"] and t["name"].endswith("weight") and ".norm." not in t["name"])
            assert listed == sum(f[key] for f in p["rank_footprint"][::tp]), (tp, pp, key)
        assert sum(f[k] for f in p["rank_footprint"][::tp] for k in ("experts", "attention", "rest")) == sum(t["bytes"] for t in p["tensors"])
        assert sum(f["kv_bytes_per_token"] for f in p["rank_footprint"][::tp]) == 4 * full * dim * max(1, kv // tp)
        assert sum(f["state_bytes_per_sequence"] for f in p["rank_footprint"][::tp]) == 4 * (len(config["attn_type_list"]) - full) * heads // tp * dim * dim

    def needs(tp):
        """The smallest memory that fits: more than what must be there, the gigabyte that is set aside included, and not much more."""
        p = json.loads(convert(source, "--dry-run", "--tp", tp, "--json").stdout)
        least = (1 << 30) + max(b + 16 * f["state_bytes_per_sequence"] + f["kv_bytes_per_token"] * config["max_position_embeddings"]
                                for b, f in zip(p["rank_bytes"], p["rank_footprint"]))
        low, high = int(least / 0.9), 2 * int(least / 0.9) + (1 << 30)
        assert not fits(tp, low) and fits(tp, high), (tp, low, high)
        while high - low > 64:
            low, high = (low, (low + high) // 2) if fits(tp, (low + high) // 2) else ((low + high) // 2, high)
        return high

    def fits(tp, memory):
        return json.loads(convert(source, "--dry-run", "--tp", tp, "--json", "--gpu-memory", memory).stdout)["verdict"]["fits"]
    need = {tp: needs(tp) for tp in (1, 2, 4, 8)}
    needs = need.get
    for memory in (needs(1) + 64, needs(1) - 64, needs(2) + 64, needs(2) - 64, needs(4) - 64, 1 << 20):
        smallest = next((tp for tp in (1, 2, 4, 8) if needs(tp) <= int(memory)), None)
        for tp in (1, 4):
            v = json.loads(convert(source, "--dry-run", "--tp", tp, "--json", "--gpu-memory", int(memory)).stdout)["verdict"]
            assert (v["fits"], v.get("smallest_tp")) == (needs(tp) <= int(memory), smallest), (memory, tp, v, smallest)
    # Padded, M2's experts have 512 columns on each of 4 ranks and 256 on each of 8: the smallest is the same whatever is asked for.
    subprocess.run(["python3", "scripts/sparse_checkpoint.py", f"{TMP}/m2", "--m2"], check=True, stdout=subprocess.DEVNULL, timeout=60)
    how = (f"{TMP}/m2", "--names-only", "--dry-run", "--quant")
    for tp in (4, 8):
        v = json.loads(convert(*how, "bf16", "--tp", tp, "--tp-align", "pad", "--json", "--gpu-memory", "100GB").stdout)["verdict"]
        assert (v["gpu_memory"], v["fits"], v["smallest_tp"]) == (100 * 10**9, tp == 8, 8), (tp, v)
    # A plan that the cuda backend refuses fits no GPU, and no --tp that it refuses is the smallest.
    for options, text in ((["bf16", "--tp", 16], "E_TP: found --tp 16"), (["int8", "--tp", 2], "E_SCHEME"), (["none; *.experts.*=int8"], "w13")):
        for memory, smallest in (("1T", 1), ("50G", None)):
            v = json.loads(convert(*how, *options, "--json", "--gpu-memory", memory).stdout)["verdict"]
            want = smallest if options[0] == "bf16" else None
            assert (v["fits"], v["kv_tokens"], v.get("smallest_tp")) == (False, 0, want) and text in v["refused"], (options, memory, v)
            said = convert(*how, *options, "--gpu-memory", memory).stdout
            assert f" is refused: {v['refused']}; " in said, said
    for options, text in ((["experts_int4", "--gpu-memory", "140G"], "fits with up to 34624 tokens of BF16 cache; a full sequence of 196608 needs --tp 2\n"),
                          (["block_fp8", "--tp", 8, "--gpu-memory", "80G"], "fits with up to 1448704 tokens of BF16 cache; the smallest --tp for a full sequence of 196608 is 4\n")):
        assert text in convert(*how, *options).stdout, convert(*how, *options).stdout
    subprocess.run(["python3", "scripts/sparse_checkpoint.py", f"{TMP}/m3", "--m3"], check=True, stdout=subprocess.DEVNULL, timeout=60)
    v = json.loads(convert(f"{TMP}/m3", "--names-only", "--dry-run", "--json", "--tp", 8, "--gpu-memory", "1T").stdout)["verdict"]
    assert v["fits"] and v["smallest_tp"] == 1 and v["kv_tokens"] == 16 * 524288 and "refused" not in v, v
    assert "does not fit: " in convert(source, "--dry-run", "--gpu-memory", "4M").stdout
    assert "; no --tp of this model holds a full sequence of " in convert(source, "--dry-run", "--gpu-memory", "64K").stdout
    refused(2, "--layout hf", "minimax-convert", source, "--dry-run", "--layout", "hf", "--gpu-memory", "80G")


def engines():
    """--layout hf: the plan names the dialect, and what is known of its readers: of experts only where experts have the scheme."""
    for quant, dialect, notes in (("fp8_attention_nvfp4_experts", "ct", ["NVFP4 experts"]), ("block_fp8", "fp8", []), ("bf16", "none", []),
                                  ("none; *.experts.*=int8; *.self_attn.*_proj.weight=bf16", "ct", ["INT8 experts"]),
                                  ("tensor_wise_fp8; *.experts.*=channel_fp8", "ct", []),
                                  ("channel_fp8; *.experts.*=tensor_wise_fp8", "ct", ["--act-scales"]),
                                  ("nvfp4a16", "ct", ["NVFP4 experts"]), ("nvfp4a16; *.experts.*=bf16", "ct", [])):
        how = (f"{DATA}/tiny-m2", "--dry-run", "--layout", "hf", "--quant", quant)
        plan = json.loads(convert(*how, "--json").stdout)
        assert plan["dialect"] == dialect and len(plan["notes"]) == len(notes) and all(n in m for n, m in zip(notes, plan["notes"])), plan
        text = convert(*how).stdout
        assert re.findall(r"^note: (.*)$", text, re.M) == plan["notes"], text
        assert f"plan: --layout hf {'' if dialect == 'none' else f'--dialect {dialect} '}--quant" in text and "  in all: " in text, text
    refused(2, ["--tp 8", "--layout hf", "engines cut them"], "minimax-convert", f"{DATA}/tiny-m2", "--dry-run", "--layout", "hf", "--tp", 8)


if __name__ == "__main__":
    for step in (schemes, recipes, sources, device, plan, engines):
        step()
    print("schemes, recipes, sources, devices, plans, other engines: as a user meets them")
