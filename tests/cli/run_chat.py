#!/usr/bin/env python3
"""minimax-run --chat: a conversation of several turns says what minimax-serve says to the same messages, token for token; messages come from
-p, a pipe or lines; stop texts, the system message, what goes to stdout and what to stderr, refusals."""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server, convert, with_m3_tokens  # noqa: E402

SAID = ["In the beginning", "And then\nwhat?", "Why é 北京?"]


def chat(packed, *args, said="", status=0):
    """(stdout, stderr) of a conversation."""
    done = subprocess.run([f"{BIN}/minimax-run", packed, "--chat", *args], input=said.encode(), capture_output=True, timeout=120)
    assert done.returncode == status, (args, done)
    return done.stdout.decode(), done.stderr.decode()


def objects(text):
    """JSON objects, one after the other."""
    out, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        one, end = decoder.raw_decode(text)
        out.append(one)
        text = text[end:]
    return out


def turns(packed, form):
    """Every reply of a conversation, beside the server's."""
    lines = "".join(x.replace("\n", "\\\n") + "\n\n" for x in SAID)  # an empty line says nothing
    got = objects(chat(packed, "--chat-format", form, "--json", "-q", "--temperature", "0", "-n", "14", "--system", "Be brief.", said=lines)[0])
    with Server(packed, "--chat-format", form) as s:
        messages = [{"role": "system", "content": "Be brief."}]
        for text, reply in zip(SAID, got, strict=True):
            messages.append({"role": "user", "content": text})
            want = s.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 14})
            message = want["choices"][0]["message"]
            assert (reply["text"], reply["reasoning"]) == (message["content"], message.get("reasoning_content", "")), (reply, message)
            assert reply["prompt_tokens"] == want["usage"]["prompt_tokens"] and reply["tokens"] == want["usage"]["completion_tokens"], (reply, want)
            assert (reply["end"] == "max_tokens") == (want["choices"][0]["finish_reason"] == "length")
            messages.append({"role": "assistant", **{k: message[k] for k in ("content", "reasoning_content") if message.get(k)}})
    return got


def streams(packed, form, first):
    """The same first reply as text: content on stdout, reasoning on stderr, neither with -q."""
    how = ("--chat-format", form, "--temperature", "0", "-n", "14", "--system", "Be brief.")
    for args, said in ((("-p", SAID[0]), ""), (("-p", "-"), SAID[0]), ((), SAID[0]), ((), SAID[0] + "\n")):
        out, err = chat(packed, *how, *args, said=said)
        assert out == first["text"] + "\n" and err == (first["reasoning"] + "\n" if first["reasoning"] else ""), (args, out, err)
        assert chat(packed, *how, *args, "-q", said=said) == (out, "")
    assert chat(packed, *how, said="") == ("", "") == chat(packed, *how, said="\n\n")


def others(packed):
    whole = objects(chat(packed, "--chat-format", "minimax-m1", "--json", "-q", "--temperature", "0", "-n", "40", "-p", SAID[0])[0])[0]["text"]
    stop = whole[9:14]
    cut = objects(chat(packed, "--chat-format", "minimax-m1", "--json", "-q", "--temperature", "0", "-n", "40", "--stop", stop, "-p", SAID[0])[0])[0]
    assert (cut["text"], cut["end"]) == (whole[: whole.index(stop)], "stop"), (cut, whole)
    drawn = {chat(packed, "--chat-format", "minimax-m1", "-n", "12", "--seed", str(i), "-p", "x")[0] for i in range(4)}
    assert len(drawn) > 1  # as generation_config.json says, or at temperature 1, unless told otherwise
    for status, args in ((4, ("-p", "x")), (2, ("--chat-format", "minimax-m1", "--added-tokens", "-p", "x")), (2, ("--chat-format", "nobody", "-p", "x")),
                         (2, ("--chat-format", "minimax-m1", "--max-model-len", "16", "-p", "x " * 40)), (2, ("--chat-format", "minimax-m1", "--stop", "", "-p", "x"))):
        out, err = chat(packed, *args, status=status)
        assert out == "" and err.count("\n") == 1 and "minimax-run: error: E_" in err, (args, out, err)
    # A reply that cannot be written ends the conversation, though more lines may come.
    with open("/dev/full", "wb") as full:
        child = subprocess.Popen([f"{BIN}/minimax-run", packed, "--chat", "--chat-format", "minimax-m1", "-n", "4", "-q"],
                                 stdin=subprocess.PIPE, stdout=full, stderr=subprocess.PIPE)
    child.stdin.write(b"x\n")
    child.stdin.flush()
    try:
        assert child.wait(30) == 5, child.returncode
    finally:
        child.kill()
    said = child.stderr.read()
    assert said.startswith(b"minimax-run: error: E_IO: stdout: "), said
    done = subprocess.run([f"{BIN}/minimax-run", packed, "--system", "x", "-p", "x"], capture_output=True)
    assert done.returncode == 2 and b"--chat" in done.stderr, done


M3 = with_m3_tokens("tests/data/tiny-m2", os.path.join(TMP, "source", "like-m3"))
for model, form in ((M3, "minimax-m3"), ("tests/data/tiny-m2", "minimax-m2"), ("tests/data/tiny-m1", "minimax-m1")):
    directory = convert(model)
    streams(directory, form, turns(directory, form)[0])
others(directory)
print("conversations of three turns as the server has them, from -p, a pipe and lines; stop texts, streams, refusals")
