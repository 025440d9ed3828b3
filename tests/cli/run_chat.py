#!/usr/bin/env python3
"""minimax-run --chat: a conversation of several turns says what minimax-serve says to the same messages, token for token; messages come from
-p, a pipe or lines; stop texts, the system message, what goes to stdout and what to stderr, refusals."""
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

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
    with Server(packed, "--chat-format", "minimax-m1") as s:  # stop texts of white space end a reply with their token, as in the server
        for seed, stop in ((2, " and"), (3, ".\n"), (0, "\n"), (1, "\n")):
            tokens = 60
            for _ in range(2):  # the second time its token is the last one that fits
                body = {"messages": [{"role": "user", "content": "x"}], "temperature": 1, "seed": seed, "stop": stop, "max_tokens": tokens}
                how = ("--temperature", "1", "--seed", str(seed), "--stop", stop, "-n", str(tokens), "-p", "x")
                want, got = s.post("/v1/chat/completions", body), objects(chat(packed, "--chat-format", "minimax-m1", "--json", "-q", *how)[0])[0]
                tokens, end = want["usage"]["completion_tokens"], want["choices"][0]["finish_reason"]
                assert (got["text"], got["tokens"]) == (want["choices"][0]["message"]["content"], tokens), (got, want)
                assert (got["end"] == "max_tokens") == (end == "length"), (got, want)
    drawn = {chat(packed, "--chat-format", "minimax-m1", "-n", "12", "--seed", str(i), "-p", "x")[0] for i in range(4)}
    assert len(drawn) > 1  # as generation_config.json says, or at temperature 1, unless told otherwise
    assert "--chat-format minimax-m1 is its family's" in chat(packed, "-n", "4", "-p", "x")[1]
    assert chat(packed, "-n", "4", "-q", "-p", "x", "--temperature", "0") == chat(packed, "-n", "4", "-q", "-p", "x", "--temperature", "0", "--chat-format", "minimax-m1")
    for status, args in ((2, ("--chat-format", "minimax-m1", "--added-tokens", "-p", "x")), (2, ("--chat-format", "nobody", "-p", "x")),
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


class Terminal:
    """A conversation with somebody at a terminal."""

    def __init__(self, packed, *args, term="dumb", then=None, env={}):
        """then: words for the shell, after the program."""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so would the program
            os.environ.update(TERM=term, HOME="/nonexistent", **env)
            shell = ("/bin/sh", "-c", f'trap : INT; set -m; "$0" "$@"; {then}') if then else ()
            words = (*shell, f"{BIN}/minimax-run", packed, "--chat", "--temperature", "0", *args)
            os.execv(words[0], words)
        self.seen = ""

    def until(self, text, seconds=60):
        """What comes up to a text, which is behind all that was read before."""
        end, got = time.monotonic() + seconds, self.seen
        while text not in got:
            assert time.monotonic() < end and select.select([self.fd], [], [], seconds)[0], (text, got[-2000:])
            try:
                got += os.read(self.fd, 65536).decode(errors="replace").replace("\r\n", "\n")
            except OSError:
                raise AssertionError((text, got[-2000:])) from None
        at = got.index(text) + len(text)
        self.seen = got[at:]
        return got[:at]

    def say(self, line, until="\n> "):
        os.write(self.fd, line.encode() + b"\n")
        return self.until(until)

    def keys(self, keys, seconds=30):
        """Keys for libedit, once it reads them: before that, shortly behind the prompt, the terminal itself edits the line."""
        end = time.monotonic() + seconds
        while termios.tcgetattr(self.fd)[3] & termios.ICANON:
            assert time.monotonic() < end, ("lines are not edited", self.seen[-2000:])
            time.sleep(0.002)
        os.write(self.fd, keys.encode())

    def end(self, seconds=30):
        """The exit status. The terminal is read meanwhile: a program that restores its modes waits until its output is read."""
        end = time.monotonic() + seconds
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(("no end", self.seen[-2000:]))
            if select.select([self.fd], [], [], 0.02)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # the program has closed it
                    time.sleep(0.02)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(done[1])


def no_color(packed):
    """NO_COLOR turns the sequences around the reasoning off, unless it is empty."""
    for value, dim in (("1", False), ("", True)):
        t = Terminal(packed, "-n", "2", env={"NO_COLOR": value})
        t.until("\n> ")
        said = t.say(SAID[0])
        assert "Reasoning: " in said and ("\x1b" in said) == dim, (value, said)
        t.say("/quit", until="/quit")
        assert t.end() == 0


def terminal(packed):
    """Commands, Ctrl-C within a reply and at the prompt, the note on the format, the rate."""
    path = os.path.join(TMP, "said.json")
    t = Terminal(packed, "-n", "12", "--stop", "\n")
    banner = t.until("\n> ")
    assert "note: the checkpoint has no chat template; --chat-format minimax-m2 is its family's\n" in banner and "/help lists commands" in banner, banner
    listed = t.say("/help", "a second one the program.\n")
    assert all(f"\n/{command} " in listed for command in ("clear", "system", "save", "load", "help", "quit")), listed
    t.until("> ")
    said = t.say("/nothing\x1b[1m")
    assert "unknown command /nothing\\x1b[1m; /help lists them" in said, said
    for word in ("/save", "/load"):
        assert f"{word}: expected the name of a file" in t.say(word), word
    assert "a NUL character in the command /system a\\0b" in t.say("/system a\x16\0b").replace("\\x00", "\\0")
    assert "(the format's own)" in t.say("/system") and "Be brief." not in t.say("/system Be brief.").split("\n", 1)[1] and "\nBe brief.\n" in t.say("/system")
    first = t.say(SAID[0])
    assert first.split("\n", 1)[1].startswith("\x1b[2mReasoning: "), first
    assert re.search(r"\n\[\d+ tokens at [\d.]+/s up to (--max-tokens|a stop text|an end token)\]\n> $", first), first
    assert "create" not in t.say("/save " + path) and "E_IO" in t.say("/save " + path)
    files = os.listdir(packed)
    assert "E_OUTPUT" in t.say(f"/save {packed}/said.json") and os.listdir(packed) == files
    told = json.load(open(path))["messages"]
    want = objects(chat(packed, "--json", "-q", "--temperature", "0", "-n", "12", "--stop", "\n", "--system", "Be brief.", said=SAID[0])[0])[0]
    assert [m["role"] for m in told] == ["system", "user", "assistant"] and told[1]["content"] == SAID[0], told
    assert (told[2]["content"], told[2].get("reasoning_content", "")) == (want["text"], want["reasoning"]), (told, want)
    second = t.say("And then?").split("\n[")[0]
    # The same again from the file, after other words; and a message that begins with a slash.
    t.say("/clear")
    t.say("Something else")
    t.say("/load " + path)
    assert t.say("And then?").split("\n[")[0] == second
    t.say("//and then")
    t.say("/save " + path + "2")
    assert json.load(open(path + "2"))["messages"][-2]["content"] == "/and then"
    for bad in ("{", "[1]", '[{"role": "user", "content": "x"}]', '[{"role": "assistant", "content": "x"}]', '[{"role": "tool", "content": "x"}]',
                '[{"role": "user", "content": ["x"]}, {"role": "assistant", "content": "x"}]', '{"messages": 1}',
                '[{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", "tool_calls": [{}]}]',
                '[{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", "reasoning_content": ["y"]}]',
                '{"messages": [], "system": "s"}', '{"messages": [], "tools": [{}]}', '{"messages": [], "chat_template_kwargs": {}}',
                *('[{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", %s}]' % more
                  for more in ('"tool_calls": "y"', '"function_call": {}', '"reasoning_details": [{"text": "y"}]'))):
        with open(path + "3", "w") as f:
            f.write(bad)
        assert "E_" in t.say("/load " + path + "3"), bad
    assert "no such" in t.say("/load " + path + "4").lower()
    t.say("/save " + path + "5")  # the conversation is as it was
    assert open(path + "5").read() == open(path + "2").read()
    nul = [{"role": "system", "content": "x\0y"}, {"role": "user", "content": "a\0b"}, {"role": "assistant", "content": "c\0", "reasoning_content": "\0d"}]
    with open(path + "7", "w") as f:
        json.dump(nul, f)
    assert "E_" not in t.say(f"/load {path}7") and "x\0y\n" in t.say("/system")
    assert "E_" not in t.say(f"/save {path}8") and json.load(open(path + "8"))["messages"] == nul
    os.write(t.fd, b"/quit\n")
    assert t.end() == 0

    t = Terminal(packed, "--ignore-eos")
    t.until("\n> ")
    os.write(t.fd, (SAID[0] + "\n").encode())
    t.until(SAID[0] + "\n")
    t.until("the")
    os.write(t.fd, b"\x03")
    assert t.until("\n> ").endswith("up to Ctrl-C]\n> ")
    assert t.say("/help", "/quit") and t.until("\n> ")
    os.write(t.fd, b"\x03")
    assert t.end() == -signal.SIGINT
    t = Terminal(packed, "--max-model-len", "600", "-n", "4")  # what is too long is refused, and the conversation goes on
    t.until("\n> ")
    first = t.say("In the").split("\n[")[0]
    assert "expected fewer than 600 (--max-model-len); the message is not part of the conversation" in t.say("x " * 900)
    t.say("/save " + path + "6")
    assert [m["content"] for m in json.load(open(path + "6"))["messages"] if m["role"] == "user"] == ["In the"], first
    t.say("/clear")
    assert t.say("In the").split("\n[")[0] == first
    os.write(t.fd, b"\x04")
    assert t.end() == 0


def edited(packed):
    """By libedit: keys move and delete, UTF-8 included; earlier lines come again; several lines are one message; Ctrl-C and Ctrl-D end
    the program, after which the terminal has its modes."""
    if subprocess.run(["pkg-config", "--exists", "libedit"], check=False).returncode:
        return "no libedit, lines are not edited"
    path, ready = os.path.join(TMP, "edited.json"), "up to --max-tokens]\n"
    t = Terminal(packed, "-n", "2", "--ignore-eos", term="vt100")
    t.until("> ")
    t.keys("é京xb\x02\x7fc\x01a\n")  # back, rubout, a letter; to the start, a letter
    t.until(ready)
    t.keys("more \\\nlines\n")
    t.until(ready)
    os.write(t.fd, b"cut\xc3")  # a character that is cut hides none that follows
    t.keys("\n")
    t.until(ready)
    t.keys("\x10\x10\x10\x10\n")  # four lines up: the first one
    t.until(ready)
    t.keys("\x12mor\x05\x7f\x7f!\n")  # found by its beginning; at its end, two letters less
    t.until(ready)
    t.keys(f"/save {path}\n/nothing\n")
    t.until("unknown command /nothing;")
    t.keys("\x04")
    assert t.end() == 0
    said = [m["content"] for m in json.load(open(path))["messages"] if m["role"] == "user"]
    assert said == ["aé京cb", "more \nlines", "cut", "aé京cb", "more!"], said
    t = Terminal(packed, "-n", "2", "--ignore-eos", term="vt100")  # Ctrl-Z where no shell waits: it stops nobody, and the conversation goes on
    t.until("> ")
    t.keys("\x1a")
    time.sleep(0.3)
    t.keys("more\n")
    t.until(ready)
    t.keys("\x04")
    assert t.end() == 0
    t = Terminal(packed, "-n", "2", term="vt100", then="echo status $?; stty -a; echo done")
    t.until("> ")
    t.keys("half")
    t.until("half")
    t.keys("\x03")
    after = t.until("done\n")
    assert "status 130\n" in after and " icanon " in after and " echo " in after, after
    assert t.end() == 0
    stopped(packed)
    signalled(packed)
    filled(packed)
    resized(packed)
    return "lines edited by libedit"


def stopped(packed):
    """Ctrl-Z gives the shell its terminal back each time, and fg the line; a program that was stopped otherwise sets its modes too."""
    modes = "stty -a; echo done; "
    t = Terminal(packed, "-n", "2", "--ignore-eos", term="vt100", then=f"{modes} fg; {modes} fg; {modes} fg; echo status $?")
    t.until("> ")
    for i, key in enumerate("abc"):
        t.keys(key)
        t.until(key)
        t.keys("\x1a")
        after = t.until("done\n")
        assert " icanon " in after and " echo " in after, after
        t.until("> " + "abc"[: i + 1])
    t.keys("\n")
    t.until("up to --max-tokens]\n")
    t.keys("\x04")
    t.until("status 0\n")
    assert t.end() == 0
    t = Terminal(packed, "-n", "2", term="vt100")
    t.until("> ")
    t.keys("half")
    t.until("half")
    for _ in range(2):
        os.kill(t.pid, signal.SIGSTOP)
        os.waitpid(t.pid, os.WUNTRACED)
        modes = termios.tcgetattr(t.fd)
        modes[3] |= termios.ICANON | termios.ECHO
        termios.tcsetattr(t.fd, termios.TCSANOW, modes)
        os.kill(t.pid, signal.SIGCONT)
        t.until("> half")
        t.keys("")
    t.keys("\x15\x04")
    assert t.end() == 0


def signalled(packed):
    """No handler that a signal finds while a line is typed does what it must not, whatever it interrupts (in_handler.c)."""
    if b"__asan_init" in open(f"{BIN}/minimax-run", "rb").read():
        return  # it must be the first library
    shim = os.path.join(os.environ["BUILD"], "tests", "fault", "preload", "in_handler.so")
    for number in (signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP, signal.SIGTERM):
        t = Terminal(packed, "-n", "2", term="vt100", env={"LD_PRELOAD": shim})
        t.until("> ")
        t.keys("half")
        t.until("half")
        os.kill(t.pid, number)
        if number != signal.SIGTERM:
            t.until("> half")
            t.keys("\x15\x04")
        assert t.end() == (-number if number == signal.SIGTERM else 0), number


def filled(packed):
    """A line that fills the window and more: from its start the cursor goes back to its end, and the line grows."""
    path = os.path.join(TMP, "filled.json")
    t = Terminal(packed, "-n", "2", term="vt100")
    fcntl.ioctl(t.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 4, 20, 0, 0))
    t.until("> ")
    t.keys("x" * 150 + "\x01a\x05")
    t.keys("é" * 50 + "b\n")
    t.until("up to --max-tokens]\n")
    t.keys(f"/save {path}\n/nothing\n")
    t.until("unknown command")
    t.keys("\x04")
    assert t.end() == 0
    assert json.load(open(path))["messages"][0]["content"] == "a" + "x" * 150 + "é" * 50 + "b"


def resized(packed):
    """A window that becomes narrower than the line that is typed: the line is drawn anew, keys go on where it ends, and nothing is written behind it."""
    t = Terminal(packed, "-n", "2", term="vt100")
    fcntl.ioctl(t.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    t.until("> ")
    t.keys("x" * 70)
    t.until("x" * 70)
    fcntl.ioctl(t.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    t.until("> " + "x" * 18, 10)
    t.keys("Z")
    t.until("Z", 10)
    t.keys("\x01Y")
    t.until("Y", 10)
    t.keys("\x15/nothing\n")
    t.until("unknown command /nothing;", 10)
    t.keys("\x15\x04")
    assert t.end() == 0


def transcripts(packed):
    """minimax-eval --conversations: each line is scored as the ids of its rendering, which is written here by hand."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "In the beginning"},
             {"role": "assistant", "reasoning_content": "dropped before a later question", "content": "And God said"},
             {"role": "user", "content": "And then é?"}, {"role": "assistant", "reasoning_content": "Genesis.", "content": "And it was so."}]
    text = ("]~!b[]~b]system\nBe brief.[e~[\n]~b]user\nIn the beginning[e~[\n]~b]ai\nAnd God said[e~[\n"
            "]~b]user\nAnd then é?[e~[\n]~b]ai\n<think>\nGenesis.\n</think>\n\nAnd it was so.[e~[\n")
    call = {"id": "a", "type": "function", "function": {"name": "get", "arguments": "{\"n\": 1.50}"}}
    tools = {"tools": [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"n": {"type": "number"}}}}}]}
    called = {"messages": [turns[1], {"role": "assistant", "content": None, "reasoning": "so", "tool_calls": [call]},
                           {"role": "tool", "tool_call_id": "a", "content": "x\0y"}, turns[2]], **tools}
    with Server(packed, "--chat-format", "minimax-m2") as s:
        ids = s.post("/tokenize", {"prompt": text, "parse_special": True})["tokens"]
        called_ids = s.post("/tokenize", {**called, "add_generation_prompt": False})["tokens"]

    def score(kind, name, content, status=0):
        path = os.path.join(TMP, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write(content)
        done = subprocess.run([f"{BIN}/minimax-eval", packed, kind, path, "--window", "9", "--json"], capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done
        return done.stdout or done.stderr

    lines = [json.dumps({"messages": turns}), "", json.dumps(turns, ensure_ascii=False)]
    assert score("--conversations", "c.jsonl", "\n".join(lines)) == score("--ids", "ids.json", json.dumps(ids + ids))
    assert score("--conversations", "called.jsonl", json.dumps(called)) == score("--ids", "called.json", json.dumps(called_ids))  # none of it is left out
    for bad, why in (("{", "line 2"), ("[]", "line 2: found an empty list of messages"), ('{"messages": []}', "line 2: found an empty list of messages"),
                     ("{}", "expected a list of messages, or an object"), ('[{"role": "nobody", "content": "x"}]', "line 2"), ('[{"role": "user", "content": 1}]', "line 2"),
                     ('{"messages": [{"role": "user", "content": "x"}], "tools": {}}', "line 2"), ('[{"role": "assistant", "tool_calls": [{}]}]', "line 2"),
                     ('[{"role": "assistant", "content": "x", "function_call": {}}]', "line 2"),
                     ('[{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]', "found tool_calls in a message of the role user"),
                     ('[{"role": "assistant", "content": "x", "reasoning_content": ["y"]}]', "a reasoning that is an array"),
                     ('{"system": "Be brief.", "messages": [{"role": "user", "content": "x"}]}', "found system, which is not read"),
                     ('{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": false}}', "found chat_template_kwargs"),
                     *(('{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}, %s]}' % tool, "line 2: tool 1")
                       for tool in ('1', '"x"', 'null', '[]', '{"name": 1}', '{"name": ""}', '{"function": "f"}', '{"function": {"name": "g", "parameters": "x"}}',
                                    '{"type": "web_search", "name": "g"}'))):
        said = score("--conversations", "bad.jsonl", lines[0] + "\n" + bad + "\n", status=3)
        assert why in said and "bad.jsonl" in said, said
    began = time.monotonic()  # a line is looked at once, however many empty ones follow
    assert "no conversation" in score("--conversations", "empty.jsonl", "\n" * 1000000, status=3) and time.monotonic() - began < 20
    assert "no conversation" in score("--conversations", "none.jsonl", "\n\n", status=3)


signal.alarm(300)  # no wait of this script is longer
M3 = with_m3_tokens("tests/data/tiny-m2", os.path.join(TMP, "source", "like-m3"))
with open(M3 + "/tokenizer.json", encoding="utf-8") as file:
    tokenizer = json.load(file)
vocab = tokenizer["model"]["vocab"]  # where the model says a comma, a NUL byte comes
vocab["\u0100"], vocab[","] = vocab[","], vocab["\u0100"]
with open(M3 + "/tokenizer.json", "w", encoding="utf-8") as file:
    json.dump(tokenizer, file, ensure_ascii=False)
for model, form in ((M3, "minimax-m3"), ("tests/data/tiny-m2", "minimax-m2"), ("tests/data/tiny-m1", "minimax-m1")):
    directory = convert(model)
    replies = turns(directory, form)
    assert model != M3 or any("\0" in x["text"].rstrip("\0") for x in replies), replies
    streams(directory, form, replies[0])
others(directory)
terminal(convert("tests/data/tiny-m2"))
no_color(convert("tests/data/tiny-m2"))
transcripts(convert("tests/data/tiny-m2"))
print(edited(convert("tests/data/tiny-m2")) + "; "
      "conversations of three turns as the server has them, from -p, a pipe and lines; stop texts, streams, refusals")
