#!/usr/bin/env python3
"""Conversions continued by other options, from altered sources, with altered journals, beside other outputs, over damaged outputs: what is
done is what an undisturbed run does, and what is refused is refused at the start, by name, with nothing lost."""
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile

sys.path.insert(0, "tests/cli")
import convert_files as cf  # noqa: E402
from convert_files import Scratch, small  # noqa: E402
from journal_records import header_bytes, records, sealed  # noqa: E402

CONVERT = shutil.which("minimax-convert")
USAGE, BAD, INTEGRITY, LOCKED = 2, 3, 6, 7
M2 = "tests/data/tiny-m2"
SHARD = "model-00001-of-00002.safetensors"


def killed(call, when, *args):
    """A conversion that kill -9 ends in the given system call."""
    cf.run("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={when}", CONVERT, "-q", "-j", "1",
           "--journal-every", "1K", *args)


def refused(root, status, code, *says, args):
    """A conversion that fails with this status, code (None: any) and line, and changes nothing."""
    before = cf.tree(root)
    done = cf.run(CONVERT, "-q", *args)
    if code is None:
        code = done.stderr.decode().split(": ")[2]
        assert code.startswith("E_"), done
    cf.assert_error(done, "minimax-convert", status, code, *says)
    assert cf.tree(root) == before, f"{code}: files changed"


def same(root, a, b):
    assert cf.same_files(f"{root}/{a}", f"{root}/{b}"), f"{a} differs from {b}"


def ranks_changed():
    """One rank's conversion, killed when it publishes, is not continued as one of both ranks; nor is a finished one called done."""
    with Scratch() as root:
        one, out = ("--tp", "2", "--ranks", "0"), root + "/out"
        cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *one)
        killed("renameat2", 1, M2, "-o", out, *one)
        for other in (("--tp", "2"), ("--tp", "2", "--ranks", "1"), ("--tp", "2", "--ranks", "0,1")):
            refused(root, USAGE, "E_RESUME", "--ranks", "--restart", args=(M2, "-o", out, "--resume", *other))
        cf.ok(CONVERT, "-q", M2, "-o", out, "--resume", *one)
        same(root, "out", "whole")
        for other in (("--tp", "2"), ("--tp", "2", "--ranks", "1")):
            refused(root, USAGE, "E_RESUME", "--ranks", "--force", args=(M2, "-o", out, "--resume", *other))
        cf.ok(CONVERT, "-q", M2, "-o", root + "/both", "--tp", "2")
        cf.ok(CONVERT, "-q", M2, "-o", out, "--resume", "--force", "--tp", "2")
        same(root, "out", "both")
        cf.ok("minimax-verify", "-q", out, "--source", M2)


def part_size_changed():
    """Another --part-size is another conversion, also where it makes as many parts of the same names."""
    with Scratch() as root:
        options, other, out = ("--tp", "2", "--part-size", "2500K"), ("--tp", "2", "--part-size", "3M"), root + "/out"
        cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *options)
        killed("renameat2", 1, M2, "-o", out, *options)
        refused(root, USAGE, "E_RESUME", "--part-size", "--restart", args=(M2, "-o", out, "--resume", *other))
        cf.ok(CONVERT, "-q", M2, "-o", out, "--resume", *options)
        same(root, "out", "whole")
        refused(root, USAGE, "E_RESUME", "--part-size", "--force", args=(M2, "-o", out, "--resume", *other))
        cf.ok(CONVERT, "-q", M2, "-o", out, "--resume", "--force", *other)
        assert sorted(os.listdir(out)) == sorted(os.listdir(root + "/whole")) and not cf.same_files(out, root + "/whole")


def says_both():
    """The run that is there, in its own words, and those that were expected."""
    with Scratch() as root:
        out = root + "/out"
        begun = ("--tp", "2", "--quant", "nvfp4", "--search", "absmax")
        killed("renameat2", 1, M2, "-o", out, *begun)
        for other, found, expected in ((("--tp", "4", *begun[2:]), "--tp 2 --ep 1 --pp 1", "expected --tp 4 --ep 1 --pp 1"),
                                       ((*begun, "--ep", "2"), "--tp 2 --ep 1", "expected --tp 2 --ep 2"),
                                       ((*begun, "--tp-align", "pad"), "--tp-align split", "--tp-align pad"),
                                       (("--quant", "none", "--layout", "hf"), "--layout packed", "--layout hf"),
                                       (("--tp", "2", "--quant", "int8"), "with --quant nvfp4", "expected --quant int8"),
                                       (("--tp", "2"), "with --quant nvfp4", "expected --quant none"),
                                       (begun[:4], "with --search absmax --method nearest", "expected --search mse --method nearest"),
                                       ((*begun, "--kv-scales", "drop"), "--kv-scales keep, expected", "--kv-scales drop to continue"),
                                       ((*begun, "--allow-nonfinite"), "--kv-scales keep, expected", "--kv-scales keep --allow-nonfinite to continue"),
                                       ((*begun, "--head", "int8"), "with other rules", "--head"),
                                       ((*begun, "--compress", "zstd:3"), "without --compress", "expected one with --compress zstd:3")):
            refused(root, USAGE, "E_RESUME", found, expected, "--restart", args=(M2, "-o", out, "--resume", *other))
        cf.ok(CONVERT, "-q", M2, "-o", out, "--resume", *begun)
        killed("fdatasync", 1, M2, "-o", root + "/hf", "--layout", "hf")  # whose part size is of the plan
        refused(root, USAGE, "E_RESUME", "--part-size", args=(M2, "-o", root + "/hf", "--resume", "--layout", "hf", "--part-size", "1M"))
        for other, says in ((("--tp", "4", *begun[2:]), "with --tp 2 --ep 1 --pp 1 --tp-align split, expected --tp 4"), ((*begun[:4], "--head", "int8"), "lm_head.weight=int8"),
                            (begun[:4], '"nvfp4; search=absmax", expected "nvfp4"'), ((*begun, "--part-size", "1M"), "--part-size"), ((*begun, "--compress", "zstd"), "--compress"),
                            (("--layout", "hf"), "--layout")):  # of a finished output
            refused(root, USAGE, "E_RESUME", "found a finished conversion", says, "--force", args=(M2, "-o", out, "--resume", *other))


def records_renumbered():
    """Records that tell of other steps or ranks than were carried out, with their checks made right, count for nothing."""
    def renumber(found):
        for step in (s for _, done in found for s in done):
            step[0] += 3

    def other_rank(found):
        for put in (x for _, done in found for s in done for x in s[2]):
            put[0] ^= 1

    def swapped(found):
        steps = [s for _, done in found for s in done]
        for a, b in zip(steps[::2], steps[1::2]):
            a[2], b[2] = b[2], a[2]

    def only_step(found):
        """One that fills half of what it should."""
        for step in (s for _, done in found for s in done):
            step[2] = [x for x in step[2] if x[0] == 0]

    def zeros(found):
        """Records of steps whose bytes are not there: what a file has where nothing was written."""
        import hashlib
        for step in (s for _, done in found for s in done):
            for put in step[2]:
                put[3] = struct.unpack("<Q", hashlib.sha256(bytes(put[1])).digest()[:8])[0]

    options = ("--tp", "2", "--quant", "none", "--part-size", "1M")
    for alter in (renumber, other_rank, swapped, only_step, zeros):
        with Scratch() as root:
            out, staged = root + "/out", root + "/.out.partial"
            cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *options)
            killed("fdatasync", 30, M2, "-o", out, *options)
            with open(staged + ".journal", "r+b") as f:
                text = f.read()
                assert header_bytes(text)
                head, found = records(text)
                assert sum(len(done) for _, done in found) > 5, found
                alter(found)
                f.seek(0)
                f.write(sealed(head, found))
                f.truncate()
            if alter is zeros:  # and the files that were never written to
                for name in os.listdir(staged):
                    size = os.path.getsize(f"{staged}/{name}")
                    os.truncate(f"{staged}/{name}", 0)
                    os.truncate(f"{staged}/{name}", size)
            cf.ok(CONVERT, "-q", M2, "-o", out, "--resume", *options)
            same(root, "out", "whole")


def nonfinite_changed():
    """A conversion that stores NaN as 0 is continued only by one that may, which counts all of them; the manifest says that it may."""
    with Scratch() as root:
        c = small(layers=3)
        for name in ("model.layers.0.block_sparse_moe.experts.1.w1.weight", "model.layers.2.block_sparse_moe.experts.1.w2.weight"):
            dtype, shape, data = c.tensors[name]
            c.tensors[name] = (dtype, shape, b"\x7f" + data[1:])
        c.save(root + "/src")
        out = root + "/out"
        allowed = (root + "/src", "-o", out, "--quant", "bf16", "--allow-nonfinite")
        killed("renameat2", 1, *allowed)
        refused(root, USAGE, "E_RESUME", args=(*allowed[:-1], "--resume"))
        done = cf.ok(CONVERT, *allowed, "--resume")
        assert b"\n2 weights were NaN or infinite and are stored as 0\n" in done.stderr, done.stderr
        assert "nonfinite=zero" in cf.packed(out)[1]["quant"]
        refused(root, USAGE, "E_RESUME", args=(*allowed[:-1], "--resume"))
        refused(root, USAGE, "E_RECIPE", "--allow-nonfinite", args=(root + "/src", "-o", root + "/b", "--quant", "bf16; nonfinite=zero"))


def source_altered():
    """A shard with other weights of the same size and time, and one copied, are named when a conversion would go on."""
    for change in ("altered", "copied"):
        with Scratch() as root:
            small(layers=2).save(root + "/src")
            out, shard = root + "/out", f"{root}/src/{SHARD}"
            killed("renameat2", 1, root + "/src", "-o", out)
            s = os.stat(shard)
            if change == "altered":
                with open(shard, "r+b") as f:
                    f.seek(-1, os.SEEK_END)
                    last = f.read(1)
                    f.seek(-1, os.SEEK_END)
                    f.write(bytes([last[0] ^ 1]))
            else:
                shutil.copy(shard, shard + ".new")
                os.replace(shard + ".new", shard)
            os.utime(shard, ns=(s.st_atime_ns, s.st_mtime_ns))
            assert os.stat(shard).st_mtime_ns == s.st_mtime_ns and os.stat(shard).st_size == s.st_size
            refused(root, USAGE, "E_RESUME", SHARD, "--restart", args=(root + "/src", "-o", out, "--resume"))
            cf.ok(CONVERT, "-q", root + "/src", "-o", out, "--restart")
            cf.ok("minimax-verify", "-q", out, "--source", root + "/src")


def finished_of_another():
    """A finished output of another model of the same names, types and sizes, of which one matrix of one layer differs, is not done. Nor is
    one whose companions are other ones."""
    with Scratch() as root:
        c = small(layers=2)
        c.save(root + "/one")
        for name in c.tensors:
            if name.endswith(("layers.1.self_attn.v_proj.weight", "layers.0.self_attn.v_proj.weight")):
                dtype, shape, data = c.tensors[name]
                c.tensors[name] = (dtype, shape, data[::-1])
        c.save(root + "/two")
        for path in "/one", "/two":  # --follow waits for it
            with open(root + path + "/tokenizer.json", "w", encoding="utf-8") as f:
                f.write("{}")
        for options in ((), ("--quant", "w4a16"), ("--quant", "int8", "--layout", "hf"), ("--tp", "2", "--tp-align", "pad", "--ranks", "1"),
                        ("--tp", "2", "--compress", "zstd"), ("--follow", "--follow-quiet", "0")):
            one, two = ((root + name, "-o", root + "/out", *options) for name in ("/one", "/two"))
            cf.ok(CONVERT, "-q", *one)
            cf.ok(CONVERT, "-q", *one, "--resume")
            refused(root, USAGE, "E_RESUME", "v_proj" if "hf" in options else "qkv_proj", "another source", "--force", args=(*two, "--resume"))
            cf.ok(CONVERT, "-q", *two, "--resume", "--force")
            if "zstd" not in options:
                cf.ok("minimax-verify", "-q", root + "/out", "--source", root + "/two")
            for text in ("{}", "[]", *([] if "--follow" in options else [None])):  # what is not there may still come
                name = root + "/two/generation_config.json"
                if text:
                    with open(name, "w", encoding="utf-8") as f:
                        f.write(text)
                else:
                    os.unlink(name)
                refused(root, USAGE, "E_RESUME", "generation_config.json", "--force", args=(*two, "--resume"))
                cf.ok(CONVERT, "-q", *two, "--resume", "--force")
            shutil.rmtree(root + "/out")


def says_what_differs():
    """What another run differs in stands in the line that refuses it."""
    with Scratch() as root:
        shutil.copytree(M2, root + "/src")
        killed("fdatasync", 2, M2, "-o", root + "/out", "--tp", "2", "--quant", "int8")
        for source, words, *options in ((M2, "with --tp 2 --ep 1", "--tp", "4", "--quant", "int8"), (M2, "--quant int8, expected --quant bf16", "--tp", "2", "--quant", "bf16"),
                                        (M2, "with other rules", "--tp", "2", "--quant", "int8", "--ignore", "*.w2.weight"),
                                        ("tests/data/tiny-m1", "another source", "--tp", "2", "--quant", "int8"),
                                        (M2, "another --ranks", "--tp", "2", "--quant", "int8", "--ranks", "0"),
                                        (root + "/src", "changed, moved or copied", "--tp", "2", "--quant", "int8")):
            refused(root, USAGE, "E_RESUME", words, "--restart", args=(source, "-o", root + "/out", *options, "--resume"))
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", "--tp", "2", "--quant", "int8", "--resume")


def finished_says_what_differs():
    """The line that refuses a finished output names the one thing that differs: not a list of those that might."""
    with Scratch() as root:
        shutil.copytree(M2, root + "/src")
        load = root + "/load.json"
        with open(root + "/src/config.json", encoding="utf-8") as f:
            config = json.load(f)
        theta = dict(config, rope_theta=config["rope_theta"] + 1)
        for how in (("--tp", "2", "--ep", "2"), ("--layout", "hf")):
            out, command = root + "/out", (root + "/src", "-o", root + "/out", "--quant", "block_fp8", *how)
            cf.ok(CONVERT, "-q", *command)
            other = [("another --part-size;", command, ("--part-size", "1M"), config), ("another config.json", command, (), theta),
                     ('--quant "block_fp8", expected "block_fp8; lm_head.weight=bf16"', command, ("--head", "bf16"), config),
                     ("another source;", ("tests/data/tiny-m1", *command[1:]), (), config)]
            if how[0] == "--layout":
                other.append(("--dialect fp8, expected ct", command, ("--dialect", "ct"), config))
            else:
                with open(out + "/manifest.json", encoding="utf-8") as f:
                    line = next(x for x in f if x.startswith('"model":'))[len('"model":'):-2]
                model = json.loads(line)
                rows = [[100 - 99 * (e >= model["experts"] // 2) for e in range(model["experts"])]] * model["layers"]
                with open(load, "w", encoding="utf-8") as f:
                    json.dump({"format": "minimax-expert-load", "version": 1, "model": hashlib.sha256(line.encode()).hexdigest(), "architecture": model["architecture"],
                               "load": rows}, f)
                other.append(("another --place;", command, ("--place", load), config))
            for says, args, options, text in other:
                with open(root + "/src/config.json", "w", encoding="utf-8") as f:
                    json.dump(text, f)
                refused(root, USAGE, "E_RESUME", "found a finished conversion with " + says, "--force", args=(*args, *options, "--resume"))
            with open(root + "/src/config.json", "w", encoding="utf-8") as f:
                json.dump(config, f)
            shutil.rmtree(out)


def part_beside_stale():
    """A share does not begin beside what other options left; with --restart it discards that, and its like of the same options stay."""
    with Scratch() as root:
        options, out = ("--tp", "2", "--part-size", "512K"), root + "/out"
        cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *options)
        for stale in (("--tp", "2", "--part", "0/2"), ("--tp", "4", "--part-size", "512K"), ("--tp", "2", "--part-size", "256K", "--part", "2/3")):
            killed("fdatasync", 2, M2, "-o", out, *stale)
            for how in ((), ("--resume",)):
                refused(root, USAGE, "E_RESUME", ".out.partial.journal", "--restart", args=(M2, "-o", out, *options, "--part", "1/2", *how))
            for i in (1, 0):
                cf.ok(CONVERT, "-q", M2, "-o", out, *options, "--part", f"{i}/2", "--restart")
            cf.ok(CONVERT, "-q", M2, "-o", out, *options, "--resume")
            same(root, "out", "whole")
            assert sorted(os.listdir(root)) == ["out", "whole"]
            shutil.rmtree(out)


def refusal_killed():
    """A run of other options that is killed while it is being refused leaves what was there to the options that began it."""
    with Scratch() as root:
        options, out = ("--tp", "2", "--part-size", "512K"), root + "/out"
        cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *options)
        cf.ok(CONVERT, "-q", M2, "-o", out, *options, "--part", "0/2")
        for call in ("fsync", "pwrite64", "unlinkat"):
            before = cf.tree(root)
            killed(call, 1, M2, "-o", out, "--tp", "4", "--resume")
            assert cf.tree(root) == before, call
        cf.ok(CONVERT, "-q", M2, "-o", out, *options, "--resume")
        same(root, "out", "whole")


def names_like_journals():
    """Another output whose name ends in .partial.journal, interrupted or not, is no journal."""
    with Scratch() as root:
        small().save(root + "/src")
        for name in ("q.partial.journal", "q.partial.journal.0-2", "q.partial"):
            killed("renameat2", 1, root + "/src", "-o", f"{root}/{name}", "--quant", "bf16")
            for how in ((), ("--resume",), ("--force",), ("--restart", "--force")):
                cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/q", *how)
                if how == ("--resume",):
                    shutil.rmtree(root + "/q")
            cf.ok(CONVERT, "-q", root + "/src", "-o", f"{root}/{name}", "--quant", "bf16", "--resume")
            cf.ok("minimax-verify", "-q", root + "/q", "--source", root + "/src")
            cf.ok("minimax-verify", "-q", f"{root}/{name}", "--source", root + "/src")
            shutil.rmtree(root + "/q")
            shutil.rmtree(f"{root}/{name}")


def damaged():
    """--resume says of a finished output that it is done only when that is proven; --force replaces a damaged one."""
    def flip(path):
        with open(path, "r+b") as f:
            f.seek(-1, os.SEEK_END)
            last = f.read(1)
            f.seek(-1, os.SEEK_END)
            f.write(bytes([last[0] ^ 1]))

    def shorten(path):
        os.truncate(path, os.path.getsize(path) - 1)

    packed, archive = "model-rank-00001-part-00000.safetensors", "model-rank-00001-part-00000.safetensors.zst"
    cases = [(("--tp", "2"), packed, change) for change in (flip, shorten, os.unlink)] + [(("--tp", "2"), "tokenizer.json", flip)]
    cases += [(("--tp", "2", "--compress", "zstd"), archive, change) for change in (flip, shorten, os.unlink)]
    cases += [(("--layout", "hf"), "model-00001-of-00001.safetensors", change) for change in (shorten, os.unlink)]
    with Scratch() as root:
        out = root + "/out"
        for options, name, change in cases:
            cf.ok(CONVERT, "-q", M2, "-o", out, *options)
            cf.ok(CONVERT, "-q", M2, "-o", out, *options, "--resume")
            shutil.copytree(out, root + "/whole")
            change(f"{out}/{name}")
            refused(root, INTEGRITY, None, name, args=(M2, "-o", out, *options, "--resume"))
            cf.ok(CONVERT, "-q", M2, "-o", out, *options, "--resume", "--force")
            same(root, "out", "whole")
            shutil.rmtree(out)
            shutil.rmtree(root + "/whole")


def recipes():
    """Every key of a recipe has its type."""
    with Scratch() as root:
        small().save(root + "/src")
        wrong = [{"default": "none", "rules": x} for x in ({}, {"match": "*", "scheme": "bf16"}, "bf16", None, 3, True, ["bf16"], [None], [[]], [{"match": 1, "scheme": "bf16"}],
                                                            [{"match": "*"}], [{"scheme": "bf16"}], [{"match": "*", "scheme": None}])]
        wrong += [{"default": x} for x in (None, 3, [], {})] + [{"default": "none", "search": x} for x in (None, 3, [])] + [[], "none", None, 3, {}]
        for recipe in wrong:
            with open(root + "/recipe.json", "w", encoding="utf-8") as f:
                json.dump(recipe, f)
            refused(root, BAD, None, "recipe.json", args=(root + "/src", "-o", root + "/out", "--recipe", root + "/recipe.json"))


def padding_damaged():
    """A row of padding in a block of which more is due than its size: scales that two or three pieces share are due once for each, 256 bytes more
    than there are, as many as the padding of both vocabularies has."""
    with Scratch() as root:
        small(hidden=64, heads=2, kv=2, dim=32, experts=30, inter=256, vocab=127, layers=2, fp8=False).save(root + "/src")
        options = (root + "/src", "--tp", "2", "--quant", "tensor_wise_fp8", "--tp-align", "pad")
        cf.ok(CONVERT, "-q", *options, "-o", root + "/whole")
        killed("fdatasync", 3, *options, "-o", root + "/out")
        with open(root + "/.out.partial/model-rank-00001-part-00000.safetensors", "r+b") as f:
            f.seek(8 + struct.unpack("<Q", f.read(8))[0] + 63 * 128)  # the last row of model.embed_tokens.weight
            f.write(b"\x5a" * 128)
        cf.ok(CONVERT, "-q", *options, "-o", root + "/out", "--resume")
        same(root, "out", "whole")


def old_stays():
    """A replaced checkpoint that cannot be removed is named by the name that it then has; the next run removes it."""
    with Scratch() as root:
        small().save(root + "/src")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
        said = b""
        for when in range(8, 16):
            if b"remove the old checkpoint" not in said:
                said = cf.run("strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=unlinkat", "-e", f"inject=unlinkat:error=EACCES:when={when}", CONVERT, "-q", "-j", "1",
                              root + "/src", "-o", root + "/out", "--force", "--restart", "--quant", "int8").stderr
        assert b"E_IO: .out.partial: remove the old checkpoint: Permission denied" in said, said
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--force", "--restart", "--quant", "int8")
        assert sorted(os.listdir(root)) == ["out", "src"], os.listdir(root)


def not_renamed():
    """An old checkpoint that its file system does not rename, as one in an overlay's lower layer: the line says what to do, which helps."""
    with Scratch() as root:
        small().save(root + "/src")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
        made = [CONVERT, "-q", root + "/src", "-o", root + "/out", "--force", "--quant", "int8"]
        before = open(root + "/out/manifest.json", "rb").read()
        failed = cf.run("strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=renameat2", "-e", "inject=renameat2:error=EXDEV", *made)
        assert failed.returncode == 5 and b"E_OUTPUT: " in failed.stderr and b"(an overlay, " in failed.stderr and b"move it away" in failed.stderr, failed
        assert open(root + "/out/manifest.json", "rb").read() == before
        os.rename(root + "/out", root + "/away")
        cf.ok(*made, "--resume")
        assert sorted(os.listdir(root)) == ["away", "out", "src"], os.listdir(root)


def access_unknown():
    """A source that opens is read, whatever access says: it may be wrong about lists of access, and a container may forbid it."""
    with Scratch() as root:
        small().save(root + "/src")
        cf.ok("strace", "-f", "-qq", "-o", "/dev/null", "-P", root + "/src", "-e", "inject=faccessat,faccessat2:error=EACCES", CONVERT, "-q", root + "/src", "-o", root + "/out")


OVERLAY = """
set -eu
cd "$1"
mount -t tmpfs none over
mkdir -p over/upper over/work over/m
mount -t overlay none -o userxattr,lowerdir=lower,upperdir=over/upper,workdir=over/work over/m 2>/dev/null || exit 77
shift
status=0
"$@" || status=$?
ls -A over/m
exit $status
"""


def overlay():
    """In an overlay of the kernel that is said before any work, and a directory of the upper layer is replaced."""
    with Scratch() as root:
        small().save(root + "/src")
        os.mkdir(root + "/lower")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/lower/out")
        os.mkdir(root + "/over")
        made = f"{CONVERT} -q src -o over/m/out --quant int8"
        killed = "mkdir -p over/m/.out.partial.probe/in"
        for command, status, left in ((f"{made} --force", 2, "out"), (f"{killed} && {made} --force", 2, "out"), (f"{made} --force --part 1/2", 2, "out"), (f"mv over/m/out over/m/old && {made} && {made} --force --tp 2", 0, "old out")):
            done = cf.run("unshare", "-rm", "sh", "-c", OVERLAY, "sh", root, "sh", "-c", command)
            if done.returncode in (1, 77) and b"E_" not in done.stderr:
                return print("overlay: not run: needs unshare -rm and overlays in it")
            assert done.returncode == status and done.stdout.decode().split() == left.split(), done
            assert status == 0 or (b"E_OUTPUT: over/m/out: " in done.stderr and b"move it away" in done.stderr), done


def sticky():
    """Another user's directory in a folder with the sticky bit cannot be replaced: said before any work, and nothing is left. Root, the owner
    of the folder and the owner of the directory can; a complete one of that user's is found complete."""
    if os.geteuid() != 0:
        return print("sticky: not run: needs root")
    cat = [["setpriv", "--reuid=1001", "--regid=1001", "--clear-groups"], ["setpriv", "--reuid=1002", "--regid=1002", "--clear-groups"], []]
    for case, (folder, of, by, expected) in enumerate([(0, 1001, 1, 2), (0, 1001, 0, 0), (1002, 1001, 1, 0), (0, 1001, 2, 0)]):
        with tempfile.TemporaryDirectory(dir="/tmp", prefix="mm-sticky-") as root:
            os.chmod(root, 0o755)
            small().save(root + "/src")
            os.mkdir(root + "/t")
            cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/t/out")
            for name in os.listdir(root + "/t/out"):
                os.chown(f"{root}/t/out/{name}", of, of)
            os.chown(root + "/t/out", of, of)
            os.chmod(root + "/t/out", 0o777)
            os.chown(root + "/t", folder, folder)
            os.chmod(root + "/t", 0o1777)
            made = [*cat[by], CONVERT, "-q", root + "/src", "-o", root + "/t/out"]
            cf.ok(*made, "--resume")
            done = cf.run(*made, "--force", "--quant", "int8")
            assert done.returncode == expected, (case, done)
            assert expected == 0 or (b"E_OUTPUT: " in done.stderr and b"sticky bit" in done.stderr and done.stderr.count(b"\n") == 1), (case, done)
            assert os.listdir(root + "/t") == ["out"], (case, os.listdir(root + "/t"))
            os.chmod(root + "/src", 0o711)
            unlisted = cf.run(*made[:-1], root + "/t/new")
            assert by == 2 or (unlisted.returncode == 5 and b"E_IO: " + root.encode() + b"/src: list: Permission denied" in unlisted.stderr), (case, unlisted)
            os.chmod(root + "/src", 0o755)
            if expected == 2:
                os.rename(root + "/t/out", root + "/t/two")
                os.mkdir(root + "/t/out")
                os.chown(root + "/t/out", of, of)
                for command in (made, [*cat[by], shutil.which("minimax-archive"), "pack", root + "/t/two", "-o", root + "/t/out"]):
                    done = cf.run(*command)
                    assert done.returncode == 2 and b"sticky bit" in done.stderr, (case, done)
                for staged, command in ((".new.partial", [*made[:-1], root + "/t/new"]), (".new.partial-pack", [*command[:-1], root + "/t/new"])):
                    os.mkdir(f"{root}/t/{staged}")  # another user's unfinished run, which could not be published
                    os.chown(f"{root}/t/{staged}", of, of)
                    os.chmod(f"{root}/t/{staged}", 0o777)
                    done = cf.run(*command)
                    assert done.returncode == 2 and b"sticky bit" in done.stderr and staged.encode() + b": " in done.stderr, (case, done)
                    os.rmdir(f"{root}/t/{staged}")
                    assert sorted(os.listdir(root + "/t")) == ["out", "two"], os.listdir(root + "/t")


def fixed():
    """A folder or an old checkpoint that chattr fixes is refused before any work; the set-group-ID bit of a folder is its outputs' too."""
    with Scratch() as root:
        small().save(root + "/src")
        os.mkdir(root + "/t")
        os.chmod(root + "/t", 0o2775)
        made = [CONVERT, "-q", root + "/src", "-o", root + "/t/out"]
        cf.ok(*made)
        assert os.stat(root + "/t/out").st_mode & 0o7000 == 0o2000, oct(os.stat(root + "/t/out").st_mode)
        for flag, at, name in (("a", "/t", "new"), ("i", "/t/out", "out"), ("a", "/t/out", "out")):
            if cf.run("chattr", "+" + flag, root + at).returncode != 0:
                return print("fixed: not run whole: needs chattr")
            done = cf.run(*made[:-1], f"{root}/t/{name}", "--force", "--quant", "int8")
            cf.ok("chattr", "-" + flag, root + at)
            assert done.returncode == USAGE and b"E_OUTPUT: " in done.stderr and b"append-only" in done.stderr, (flag, at, done)
            assert os.listdir(root + "/t") == ["out"], (flag, at, os.listdir(root + "/t"))


if __name__ == "__main__":
    cf.main([ranks_changed, part_size_changed, says_both, records_renumbered, nonfinite_changed, source_altered, finished_of_another, says_what_differs, finished_says_what_differs, part_beside_stale,
             refusal_killed, names_like_journals, damaged, recipes, padding_damaged, old_stays, not_renamed, access_unknown, overlay, sticky, fixed])
