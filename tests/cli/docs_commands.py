#!/usr/bin/env python3
"""Every shell command in README.md and docs/ is run, in the order of its page, or stands in NOT_RUN with the reason.

Commands are the lines of fenced blocks of shell, and in backticks those that begin with a program of ours and name what it works on. Words that
stand for a user's files become the small checkpoints of tests/data. What a page shows below a command must come again: the code of the error, and
where no word was replaced every line, up to its figures."""
import glob
import http.client
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT, BUILD = os.getcwd(), os.environ["BUILD"]
TINY = "tests/data/tiny-m2"
CHAT = "as M2.7's commands of the same page, for a model of another family; tests/cli/journey_prepare.py has names of the Hub"
NOT_RUN = {
    "hf download MiniMaxAI/MiniMax-M2.7": "fetches 230 GB",
    "hf download MiniMaxAI/MiniMax-M1-80k": "fetches 912 GB",
    "hf download MiniMaxAI/MiniMax-M3": "fetches 854 GB",
    "minimax-serve /models/m1 --device cuda --max-model-len 262144 --chat-format minimax-m1": CHAT,
    "minimax-convert MiniMaxAI/MiniMax-M3 --tp 4 --quant fp8_attention_nvfp4_experts --dry-run --gpu-memory 80GB": CHAT,
    "minimax-convert MiniMaxAI/MiniMax-M3 -o /models/m3 --tp 4 --quant fp8_attention_nvfp4_experts": CHAT,
    "minimax-serve /models/m3 --device cuda --max-model-len 131072": CHAT,
    "minimax-verify /models/m3 --source MiniMaxAI/MiniMax-M3": CHAT,
    "./scripts/bootstrap.sh demo": "installs packages; then runs the second half of README's commands",
    "minimax run build/demo/tiny-m1 --chat --max-tokens 60": "works on what the demo made; tests/cli/run_chat.py converses",
    "tar xzf minimax-*-x86_64.tar.gz && cd minimax-*-x86_64": "unpacks what make release made; scripts/release_test.sh does",
    "bin/minimax convert tiny-m2 -o packed && bin/minimax run packed -p 'In the beginning' -n 60": "works on what was unpacked; scripts/release_test.sh has it",
    "vllm serve DIR --load-format minimax --tensor-parallel-size 8": "needs vLLM and GPUs; tests/python/test_vllm.py has the loader",
    "minimax-hold DIR SOCKET": "needs a GPU: scripts/gpu.sh has it, part hold",
    "minimax-hold /models/m2-tp1 /run/minimax/hold.sock": "needs a GPU: scripts/gpu.sh has it, part hold",
    "mpirun --host a,b -n 1 minimax-serve /models/m1-tp8-pp2 --device cuda : -n 1 minimax-worker /models/m1-tp8-pp2":
        "needs two hosts: tests/fault/processes.sh has two processes of one",
    "minimax-serve /models/m2-tp1 --device cuda --devices 1 --port 8001 --kv-listen 127.0.0.1:9000 --kv-offload 8G --max-num-batched-tokens 8192": "needs two GPUs: tests/cli/serve_split.py has both on CPUs",
    "minimax-serve /models/m2-tp1 --device cuda --devices 0 --port 8000 --prefill-from 127.0.0.1:9000 --kv-offload 64G": "as the one before",
    "minimax-serve /models/m2-tp1 --device cuda --attach /run/minimax/hold.sock": "needs a GPU: scripts/gpu.sh has it, part hold",
}
WORDS = {"MiniMaxAI/MiniMax-M2.7": TINY, "MiniMaxAI/MiniMax-M1-80k": "tests/data/tiny-m1", "/models/m2.7": "DIR", "/models/m1": "m1", "KEY": "key",
         "--max-model-len 131072": "--max-model-len 2048", "SRC": TINY, "big-m2": TINY, "DIR": "DIR", "M2-config": TINY, "--dummy-tp 4": "--dummy-tp 2", "TEXT": "'In the beginning'", "OUT": "packed-up", "NEW": "cut", "N": "4", "…": TINY + " -o few",
         "/models/m2-tp1": "DIR", "cuda": "cpu"}
PART = re.compile(r"(?<![\w./-])(" + "|".join(map(re.escape, WORDS)) + r")(?![\w.-])")
OPERAND = re.compile(r"^minimax-\w+ .*(?<![\w-])(SRC|DIR|OUT|build/|tests/)")
CONVERT = "minimax-convert tests/data/tiny-m2 -q -o "
# What a command works on that no command of its page has made.
MADE = {"keys.txt": "echo key >keys.txt", "DIR": CONVERT + "DIR", "build/tp8": CONVERT + "build/tp8 --tp 8", "build/demo/tiny-m2": CONVERT + "build/demo/tiny-m2 --tp 2 --quant block_fp8",
        "build/demo/tiny-m1": CONVERT.replace("m2", "m1") + "build/demo/tiny-m1 --tp 2 --quant block_fp8",
        "m2-none": CONVERT + "m2-none", "m2-nvfp4": CONVERT + "m2-nvfp4 --quant nvfp4a16", "text-ids.json": f"head -c 3000 {TINY}/held-out-ids.json "
        "| sed 's/,[^,]*$/]/' >text-ids.json", "PRIVATE.pem": "openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out PRIVATE.pem && "
        "openssl pkey -in PRIVATE.pem -pubout -out PUBLIC.pem"}


def commands(page):
    """(command, the lines shown below it) in the order of the page."""
    text = open(page, encoding="utf-8").read()
    found = []
    for m in re.finditer(r"^```(\w*)\n(.*?)^```|`([^`\n]+)`", text, re.M | re.S):
        if m[3]:
            if OPERAND.match(m[3]):
                found.append((m[3], []))
        elif m[1] in ("", "sh", "bash", "console"):
            prompts = re.search(r"^\$ ", m[2], re.M)
            for line in re.sub(r"\\\n *", "", m[2]).splitlines():
                if line.startswith("$ ") or (not prompts and line.strip()):
                    found.append((re.sub(r"  +#.*", "", line.removeprefix("$ ")), []))
                elif line.strip():
                    found[-1][1].append(line)
    return found


def prompts(path):
    data = struct.pack("<9i", *range(3, 12))
    header = b'{"ids.a":{"dtype":"I32","shape":[9],"data_offsets":[0,36]}}'
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + data)


def shell(command):
    ends = "" if "| head" in command else "set -o pipefail; "  # SIGPIPE ends what head does not read
    return subprocess.run(["bash", "-c", ends + command], capture_output=True, text=True, check=False)


def figures(line):
    return re.sub(r"\b[0-9a-f]{64}\b|\d[\d.]*(?: [KMG]i?B)?", "#", line.strip())


def wrong_output(command, as_written, shown, p):
    """What is not as the page shows it, or None."""
    error = next((re.match(r"minimax-\w+: error: (E_\w+):", s) for s in shown if "error: " in s), None)
    if error:
        return None if p.returncode and error[1] in p.stderr else f"status {p.returncode}, expected {error[1]}: {p.stderr}"
    if p.returncode:
        return f"status {p.returncode}: {p.stderr}"
    printed = {figures(s) for s in (p.stdout + p.stderr).splitlines()}
    missing = [s for s in shown if as_written and figures(s) not in printed and "minimax-run" not in command]  # a text hangs on the CPU's sums
    return f"no line like {missing[0]!r} in {p.stdout + p.stderr}" if missing else None


def prepare(command):
    for name, how in MADE.items():
        target = re.search(r"(?:-o|--report|--collect|--logits) *" + re.escape(name) + r"(?=\s|$)", command)
        if not target and re.search(r"(?<![\w/.-])" + re.escape(name) + r"(?![\w.-])", command) and not os.path.exists(name):
            p = shell(how)
            assert p.returncode == 0, (how, p.stderr)


def ready(port, process):
    """Whether the server has its model: one that only listens may still refuse an option."""
    while process.poll() is None:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10).status == 200
        except (OSError, http.client.HTTPException):
            time.sleep(0.01)
    return False


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_page(page, tried):
    """Runs a page's commands in a folder of their own; what went wrong."""
    wrong, port, server = [], free_port(), None
    for written, shown in commands(page):
        command = PART.sub(lambda m: WORDS[m[1]], written).replace("8000", str(port))
        if written in NOT_RUN:
            tried["listed"].add(written)
            continue
        if re.search(r"-o DIR\b", command):
            subprocess.run(["rm", "-rf", "DIR"], check=True)
        command = re.sub(r"--text (FILE|text.txt)", f"--text {ROOT}/tests/data/held-out.txt --limit 1 --window 64", command)
        command = re.sub(r"--ids FILE", f"--ids {TINY}/held-out-ids.json --limit 1", command).replace("--limit 40", "--limit 2")
        command = command.replace("--max-model-len 32768", "--max-model-len 1024")  # the small model's replies go on to the last position
        prepare(command)
        if command.startswith("minimax-serve"):
            if server:
                server.send_signal(signal.SIGTERM)
                server.wait()
            if "--port" not in command:
                command += f" --port {port}"
            if "--max-model-len" not in command:
                command += " --max-model-len 1024"
            if "--chat-format" not in command:  # the small checkpoint has no template
                command += " --chat-format minimax-m2"
            server = subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if not ready(port, server):
                wrong.append(f"{page}: {written}: {server.communicate()[1]}")
        else:
            ran = re.sub(r"(^|\| )curl ", r"\1curl --fail-with-body -sS ", command)  # a refused request fails
            bad = wrong_output(command, command == written, shown, shell(ran))
            if bad:
                wrong.append(f"{page}: {written}: {bad}")
        tried["run"] += 1
    if server:
        server.send_signal(signal.SIGTERM)
        if server.wait() not in (0, -signal.SIGTERM, 143):
            wrong.append(f"{page}: minimax-serve ended with {server.returncode}")
    return wrong


def main():
    os.environ["PATH"] = f"{BUILD}/bin:{os.environ['PATH']}"
    wrong, tried = [], {"run": 0, "listed": set()}
    pages = ["README.md", *sorted(glob.glob("docs/*.md"))]
    with tempfile.TemporaryDirectory(prefix="mm-docs-") as work:
        for page in pages:
            place = os.path.join(work, os.path.basename(page))
            os.makedirs(place + "/build/demo")
            for name in ("tests", "scripts", "README.md", "docs"):
                os.symlink(os.path.join(ROOT, name), os.path.join(place, name))
            os.chdir(place)
            prompts("prompts.safetensors")
            wrong += run_page(page, tried)
        os.chdir(ROOT)
    wrong += [f"NOT_RUN has a command that no page has: {c}" for c in NOT_RUN if c not in tried["listed"]]
    for line in wrong:
        print(line.strip())
    print(f"commands of {len(pages)} pages: {tried['run'] - len(wrong)} of {tried['run']} run as written there, {len(tried['listed'])} listed with a reason")
    return bool(wrong)


sys.exit(main())
