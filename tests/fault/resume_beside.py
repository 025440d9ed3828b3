#!/usr/bin/env python3
"""What lies beside the weights when a conversion is continued: companions that cannot be copied are refused before the first weight, and a
failure after the last one loses no part."""
import json
import os
import shutil

from resume_cases import BAD, CONVERT, M2, cf, killed, refused, same

LIMIT = 8


def code_source(root):
    """tiny-m2 whose config names code."""
    source = root + "/src"
    shutil.copytree(M2, source)
    with open(source + "/config.json", encoding="utf-8") as f:
        config = json.load(f)
    with open(source + "/config.json", "w", encoding="utf-8") as f:
        json.dump(config | {"auto_map": {"AutoConfig": "modeling_x.X"}}, f)
    with open(source + "/modeling_x.py", "w", encoding="utf-8") as f:
        f.write("class X:\n    pass\n")
    return source


def huge(path):
    with open(path, "wb") as f:
        f.truncate((256 << 20) + 1)


def many(path):
    for i in range(64):
        with open(f"{os.path.dirname(path)}/m{i}.py", "w", encoding="utf-8"):
            pass


def refused_at_the_start():
    """Nothing is staged, and what an earlier run staged stays."""
    for name, make, status, code in (("more.py", lambda p: os.symlink("/etc/passwd", p), BAD, "E_FS_OUTSIDE"),
                                     ("more.py", lambda p: os.symlink("nothing", p), BAD, "E_FS_MISSING"),
                                     ("more.py", os.mkfifo, BAD, "E_FS_TYPE"), ("more.py", huge, BAD, "E_LIMIT"), ("src", many, LIMIT, "E_LIMIT"),
                                     ("vocab.json", huge, BAD, "E_LIMIT")):
        with cf.Scratch() as root:
            source, out = code_source(root), root + "/out"
            path = f"{source}/{name if name != 'src' else 'x'}"
            make(path)
            refused(root, status, code, name, args=(source, "-o", out))
            shutil.rmtree(source)
            source = code_source(root)
            killed("renameat2", 1, source, "-o", out, "--tp", "2")
            make(path)
            refused(root, status, code, name, args=(source, "-o", out, "--tp", "2", "--resume"))
            for left in os.listdir(source):
                if left in ("more.py", "vocab.json") or left.startswith("m") and left[1:-3].isdigit():
                    os.unlink(f"{source}/{left}")
            cf.ok(CONVERT, "-q", source, "-o", out, "--tp", "2", "--resume")
            cf.ok(CONVERT, "-q", source, "-o", root + "/whole", "--tp", "2")
            same(root, "out", "whole")


def lost_at_the_end():
    """A companion that goes away while weights are converted ends the run; what was converted is continued."""
    with cf.Scratch() as root:
        source, out = code_source(root), root + "/out"
        cf.ok(CONVERT, "-q", source, "-o", root + "/whole")
        path = source + "/modeling_x.py"
        done = cf.run("strace", "-f", "-qq", "-o", "/dev/null", "-P", path, "-e", "trace=openat", "-e", "inject=openat:error=ENOENT:when=2+", CONVERT, "-q",
                      source, "-o", out)
        cf.assert_error(done, "minimax-convert", BAD, "E_FS_MISSING", "modeling_x.py")
        assert any(n.endswith(".safetensors") for n in os.listdir(root + "/.out.partial")), "the parts are gone"
        cf.ok(CONVERT, "-q", source, "-o", out, "--resume")
        same(root, "out", "whole")
        assert sorted(os.listdir(root)) == ["out", "src", "whole"]


def companion_removed():
    """What an earlier run copied and the source has no more is not published."""
    for options in (("--tp", "2"), ("--tp", "2", "--compress", "zstd"), ("--layout", "hf")):
        with cf.Scratch() as root:
            source, out = code_source(root), root + "/out"
            for name in ("LICENSE", "other.py"):
                with open(f"{source}/{name}", "w", encoding="utf-8") as f:
                    f.write("# " + name)
            killed("renameat2", 1, source, "-o", out, *options)
            staged = os.listdir(root + "/.out.partial")
            assert {"LICENSE", "other.py", "tokenizer.json"} <= set(staged), staged
            for name in ("LICENSE", "other.py", "tokenizer.json"):
                os.unlink(f"{source}/{name}")
            cf.ok(CONVERT, "-q", source, "-o", out, *options, "--resume")
            cf.ok(CONVERT, "-q", source, "-o", root + "/whole", *options)
            same(root, "out", "whole")


if __name__ == "__main__":
    cf.main([refused_at_the_start, lost_at_the_end, companion_removed])
