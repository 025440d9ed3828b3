#!/usr/bin/env python3
"""What an operator starts: curl as docs/serving.md has it, a body for which curl waits to be told to go on, the systemd unit and what its commands
take, a start whose first answer comes before the model is loaded, signals."""
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server, convert  # noqa: E402

PACKED = convert("tests/data/tiny-m2")


def curl(s, path, *args):
    done = subprocess.run(["curl", "-sS", "-m", "60", "-w", "\n%{http_code}", f"http://127.0.0.1:{s.port}{path}", *args], capture_output=True, check=True)
    body, status = done.stdout.rsplit(b"\n", 1)
    return int(status), body.decode()


def by_curl():
    """The documented command; a long body; a reply read as it comes; the headers alone."""
    text = re.search(r"^curl http://127.0.0.1:8000(\S+) -H '(.*)' \\\n  -d '(.*)'$", open("docs/serving.md").read(), re.M)
    path, header, body = text.groups()
    with Server(PACKED, "--api-key", "SECRET", "--chat-format", "minimax-m2", "--max-model-len", "256") as s:
        status, said = curl(s, path, "-N", "-H", header, "-d", body)
        assert status == 200 and said.endswith("data: [DONE]\n\n"), said
        assert curl(s, path, "-d", body)[0] == 401
        long = os.path.join(TMP, "long.json")
        with open(long, "w") as f:
            json.dump({"prompt": "And God", "max_tokens": 1, "pad": "x" * (3 << 20)}, f)
        status, said = curl(s, "/v1/completions", "-H", header, "-H", "Expect: 100-continue", "-d", f"@{long}")
        assert status == 200 and json.loads(said)["usage"]["completion_tokens"] == 1
        status, said = curl(s, "/health", "-I")
        assert status == 200 and re.search(r"^Content-Length: \d+", said, re.M) and said.endswith("\r\n\r\n"), said


def unit():
    """systemd finds nothing wrong with the unit, its command takes what it gives it, and damage ends with a status that is not tried again:
    RestartPreventExitStatus is of the main process alone, so no other one may find it first."""
    text = open("scripts/minimax-serve.service").read().replace("/usr/local/bin", BIN)
    commands = re.findall(r"^Exec(\w+)=(.*)$", text, re.M)
    assert [kind for kind, _ in commands] == ["Start"], commands
    path = os.path.join(TMP, "minimax-serve.service")
    with open(path, "w") as f:
        f.write(text)
    conf = os.path.join(TMP, "minimax-serve.conf")
    with open(conf, "w") as f:
        f.write("max-num-seqs 4\n")
    damaged = shutil.copytree(PACKED, os.path.join(TMP, "damaged"))
    os.truncate(damaged + "/model-rank-00000-part-00000.safetensors", 5000)
    for packed, status in ((PACKED, 0), (damaged, 6)):
        words = [w.replace("${MODEL}", packed).replace("/etc/minimax-serve.conf", conf) for w in commands[0][1].split()]
        done = subprocess.run([*words, "--check"], capture_output=True)
        assert done.returncode == status, (words, done)
    assert " 6" in re.search(r"^RestartPreventExitStatus=(.*)$", text, re.M)[1]
    if not shutil.which("systemd-analyze"):
        return "not looked at by systemd-analyze, which is not here"
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip(), done
    return "verified by systemd-analyze"


def notified():
    """The service manager hears when requests are served and when they end; the image's health check asks for the same."""
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(f"{TMP}/notify")
    heard.settimeout(60)
    check = json.loads(re.search(r"CMD (.+)", open("scripts/Dockerfile").read().replace("\\\n", ""))[1])
    with Server(PACKED, "--max-model-len", "64", prefix=["env", f"NOTIFY_SOCKET={TMP}/notify"]) as s:
        assert heard.recv(4096) == b"READY=1\nSTATUS=ready"
        for port, ok in ((s.port, True), (1, False)):
            done = subprocess.run([w.replace("8000", str(port)) for w in check], capture_output=True)
            assert (done.returncode == 0) == ok, (check, done)
    assert heard.recv(4096) == b"STOPPING=1\nSTATUS=draining"
    for odd in ("", "/", "@", "relative", "/nobody/listens", "/" + "x" * 200):
        with Server(PACKED, "--max-model-len", "64", prefix=["env", f"NOTIFY_SOCKET={odd}"]):
            pass


def keys():
    """A key that is empty, as of a variable that is not set, would let everybody in."""
    for key in ("", " ", " a", "a ", "a\n", "\x7f"):
        command = [f"{BIN}/minimax-serve", PACKED, "--port", "0", "--check", "--api-key", "k", "--api-key", key]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and "--api-key" in done.stderr, (key, done)
    with Server(PACKED, "--api-key", "k!~", "--max-model-len", "64") as s:
        status = [s.request("GET", "/v1/models", headers={"x-api-key": k})[0] for k in ("k!~", "", "k")]
        assert status == [200, 401, 401], status


def signals():
    """Signals that say nothing to a server are ignored; a terminal that closes lets it drain, and so does the limit of CPU time, with status 8."""
    long = json.dumps({"prompt": "And God", "max_tokens": 400, "ignore_eos": True, "temperature": 0})

    def running(s):
        c = s.connect()
        c.request("POST", "/v1/completions", long)
        while not s.metrics()["requests_running"]:
            time.sleep(0.01)
        return c

    for number, prefix, status in ((signal.SIGHUP, (), 0), (signal.SIGXCPU, (), 8), (signal.SIGHUP, ("nohup",), None)):
        s = Server(PACKED, prefix=prefix)
        for ignored in (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO):
            s.process.send_signal(ignored)
        c = running(s)
        for _ in range(3):  # none of them is the second signal
            s.process.send_signal(number)
            time.sleep(0.02)
        assert json.loads(s.get("/health"))["status"] == ("ready" if status is None else "draining")
        r = c.getresponse()
        assert r.status == 200 and json.loads(r.read())["usage"]["completion_tokens"] == 400
        if status is None:
            s.process.send_signal(signal.SIGTERM)
        assert s.process.wait(60) == (status or 0), (number, open(s.log).read())
        assert ("E_CPU_TIME" in open(s.log).read()) == (number == signal.SIGXCPU)
    for program in ("serve", "hold", "worker"):  # from their first step on: here they wait to write their help
        reader, writer = os.pipe()
        os.write(writer, b"x" * (fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096) - 100))
        early = subprocess.Popen([f"{BIN}/minimax-{program}", "--help"], stdout=writer)
        os.close(writer)
        while "S (sleeping)" not in open(f"/proc/{early.pid}/status").read():
            time.sleep(0.01)
        early.send_signal(signal.SIGUSR1)
        with open(reader, "rb") as f:
            assert b"usage:" in f.read() and early.wait(60) == 0, (program, early.returncode)
    s = Server(PACKED)
    running(s)
    for number in (signal.SIGHUP, signal.SIGTERM):
        s.process.send_signal(number)
        time.sleep(0.02)
    assert s.process.wait(60) == 0 and "draining" in open(s.log).read()


signals()
notified()
keys()
if not shutil.which("curl"):
    print("no curl here")
    sys.exit(77)
by_curl()
print(f"curl whole, streamed, with a long body and with HEAD; the systemd unit {unit()}")
