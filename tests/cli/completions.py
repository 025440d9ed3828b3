#!/usr/bin/env python3
"""Completions as the shells give them (each only where it is installed): first words, options of a program and of what a word leads to."""
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time

BIN = os.path.join(os.path.abspath(os.environ["BUILD"]), "bin")
PROGRAMS = ("minimax", "minimax-archive", "minimax-bench", "minimax-convert")
SERVE = ["--random-input-len", "--random-output-len", "--random-range-ratio", "--range-ratio", "--request-rate"]
VERBS = ["list", "pack", "sign", "unpack"]
SUBJECTS = ["attention", "choices", "decode", "drafts", "kernels", "layers", "mixed", "prefill", "serve"]
# a line, and what may stand in place of its last word
LINES = {"minimax-bench serve --r": SERVE, "minimax-bench layers --k": ["--kv-cache-dtype"], "minimax-bench serve --k": [], "minimax-bench ": SUBJECTS,
         "minimax-archive ": VERBS, "minimax bench serve --r": SERVE, "minimax archive ": VERBS, "minimax convert --tp": ["--tp", "--tp-align"],
         "minimax-bench serve --endpoint ": ["chat", "completions"], "minimax-convert --layout ": ["hf", "packed"]}


def bash(folder, line):
    words = line.split(" ")
    text = "".join(f". {folder}/{p}.bash; " for p in PROGRAMS)
    quoted = " ".join(f"'{w}'" for w in words)
    text += f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _{words[0]}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "--norc", "-c", text], capture_output=True, text=True, check=True, cwd=folder + "/empty").stdout.split()


def bash_files(folder):
    """Typed at a terminal: a file's name with a space becomes one word, and what stands behind a = is the option's."""
    os.mkdir(folder + "/files")
    os.mkdir(folder + "/files/my model")
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder + "/files")
        os.execvpe("bash", ["bash", "--norc", "-i"], {**os.environ, "TERM": "dumb", "PS1": ""})
    seen, end = b"", time.monotonic() + 20
    os.write(fd, f". {folder}/minimax-convert.bash; minimax-convert() {{ printf 'is<%s>' \"$@\"; }}\n".encode())
    os.write(fd, b"minimax-convert my\t --layout=pa\t\nexit\n")
    while True:
        assert time.monotonic() < end, seen
        try:
            if select.select([fd], [], [], 0.2)[0]:
                seen += os.read(fd, 65536)
        except OSError:
            break
    os.waitpid(pid, 0)
    os.close(fd)
    assert re.search(rb"is<my model/?>is<--layout=packed>", seen), seen


def fish(folder, line):
    text = "".join(f"source {folder}/{p}.fish; " for p in PROGRAMS) + f"complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", text], capture_output=True, text=True, check=True, cwd=folder + "/empty",
                          env={**os.environ, "HOME": folder, "XDG_CACHE_HOME": folder, "XDG_DATA_HOME": folder, "XDG_CONFIG_HOME": folder})
    return [x.split("\t")[0] for x in done.stdout.splitlines()]


def zsh(folder, line):
    """What is listed behind the line in a terminal."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder + "/empty")
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": "", "COLUMNS": "300", "LINES": "100"})
    seen = b""

    def until(end, seconds=20):
        nonlocal seen
        last = time.monotonic() + seconds
        while not end(seen):
            assert time.monotonic() < last, seen
            if select.select([fd], [], [], 0.2)[0]:
                seen += os.read(fd, 65536)
        found, seen = seen, b""
        return found.decode()
    os.write(fd, f"PS1=; unsetopt zle_bracketed_paste; fpath=({folder} $fpath); autoload -Uz compinit; compinit -u -D; zstyle ':completion:*' list-prompt ''; "
                 f"LISTMAX=0; setopt noautomenu nolistbeep; print rea''dy\n".encode())
    until(lambda s: b"ready" in s.split(b"rea''dy")[-1])
    os.write(fd, line.encode() + b"\t\t")
    time.sleep(0.7)
    os.write(fd, b"\x15print do''ne\n")
    said = until(lambda s: b"done" in s.split(b"do''ne")[-1])
    os.write(fd, b"exit\n")
    os.waitpid(pid, 0)
    os.close(fd)
    return re.findall(r"(?<![\w-])-{0,2}[a-z][a-z-]*", said.split("do''ne")[0])


def main():
    counted = []
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(folder + "/empty")
        for p in PROGRAMS:
            for shell, name in (("bash", p + ".bash"), ("fish", p + ".fish"), ("zsh", "_" + p)):
                with open(f"{folder}/{name}", "wb") as f:
                    subprocess.run([f"{BIN}/{p}", "--help-" + shell], stdout=f, check=True)
        for shell, of in (("bash", bash), ("fish", fish), ("zsh", zsh)):
            if not shutil.which(shell):
                print(f"{shell} is not installed: its completions were not tried")
                continue
            for line, want in LINES.items():
                found = of(folder, line)
                if shell == "zsh":  # a single one is completed in place, and other text stands around the list
                    assert set(want) <= set(found) or len(want) == 1, (line, found)
                    assert "--kv-cache-dtype" not in found or "--kv-cache-dtype" in want, (line, found)
                else:
                    assert sorted(found) == want, (shell, line, found)
            if shell == "bash":
                bash_files(folder)
            counted.append(shell)
    print(f"{len(LINES)} lines completed by {', '.join(counted)}")
    return 0 if "bash" in counted else 1


if __name__ == "__main__":
    sys.exit(main())
