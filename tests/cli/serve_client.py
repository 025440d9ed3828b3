"""A minimax-serve of a small checkpoint to talk to, and plain HTTP requests: what the tests of the server share."""
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]


def convert(model, *options):
    target = os.path.join(TMP, os.path.basename(model) + ("-groups" if "--attn-tp" in options else ""))
    if not os.path.exists(target):
        subprocess.run([f"{BIN}/minimax-convert", model, "-o", target, "--quant", "none", "-q", *options], check=True)
    return target


M3_TOKENS = {"]!p~[": "]<]minimax[>[", "<minimax:tool_call>": "]<]image[>[", "</minimax:tool_call>": "]<]video[>[", "<think>": "<mm:think>", "</think>": "</mm:think>"}


def with_m3_tokens(model, target):
    """A copy of an M2 checkpoint whose added tokens are those of M3: its replies are noise in either format."""
    shutil.copytree(model, target)
    with open(target + "/tokenizer.json", encoding="utf-8") as f:
        tokenizer = json.load(f)
    for token in tokenizer["added_tokens"]:
        token["content"] = M3_TOKENS.get(token["content"], token["content"])
    with open(target + "/tokenizer.json", "w", encoding="utf-8") as f:
        json.dump(tokenizer, f, ensure_ascii=False)
    return target


def turn_with_calls(s, body):
    """The usage of a reply with calls, and a function: the usage of the next turn, whose history has the reply's message, changed by `change`."""
    first = s.post("/v1/chat/completions", body)
    said = {k: v for k, v in first["choices"][0]["message"].items() if not k.startswith("reasoning")}
    assert said["tool_calls"], first
    history = [m for m in body["messages"] if m["role"] != "assistant"]  # the last may be the beginning of the reply

    def next_turn(change=lambda message: None):
        message = json.loads(json.dumps(said))
        change(message)
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "hot"} for c in message["tool_calls"]]
        more = {k: body[k] for k in ("tools", "thinking", "chat_template_kwargs") if k in body}
        return s.post("/v1/chat/completions", {**more, "messages": [*history, message, *results], "max_tokens": 1})["usage"]

    return first["usage"], next_turn


def comes_back(s, body):
    """A reply with calls whose message comes back: the prompt of the next turn begins with the tokens of this prompt and of this reply. A changed call is
    written anew."""
    used, next_turn = turn_with_calls(s, body)
    known = used["prompt_tokens"] + used["completion_tokens"] - 1  # the token that ends the reply is never fed
    cached = lambda usage: usage["prompt_tokens_details"]["cached_tokens"]
    again = next_turn()
    assert known - 1 <= cached(again) < again["prompt_tokens"], (used, again)
    other = next_turn(lambda message: message["tool_calls"][0]["function"].update(arguments='{"city": "Lagash"}'))
    assert cached(other) < known - 4, (used, other)


class Server:
    """A running server; ends with the block, and must end well."""

    def __init__(self, packed, *options, ready=True, prefix=(), program="minimax-serve"):
        self.log = os.path.join(TMP, f"log-{time.monotonic_ns()}")
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([*prefix, f"{BIN}/{program}", packed, "--port", "0", *options], stderr=log, stdout=log)
        self.port = int(self.wait_for(r"listening on http://\S+:(\d+)"))
        if ready:
            self.wait_for("ready after")

    def wait_for(self, pattern):
        for _ in range(12000):
            found = re.search(pattern, open(self.log).read())
            if found:
                return found.group(found.re.groups)
            assert self.process.poll() is None, open(self.log).read()
            time.sleep(0.01)
        raise AssertionError(f"no {pattern} in {open(self.log).read()}")

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if kind or status:
            print(open(self.log).read()[-4000:])
        assert status == 0, status

    def connect(self, timeout=300):  # a prompt of thousands of tokens takes a minute where others compute too
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method, path, body=None, headers={}):
        """(status, headers, bytes) of a request over a connection of its own."""
        c = self.connect()
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        c.request(method, path, body, headers)
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, r.headers, data

    def get(self, path):
        status, _, data = self.request("GET", path)
        assert status == 200, (path, status, data)
        return data

    def metrics(self):
        """The values of /metrics by their names and labels, without minimax_ and the label that all have."""
        found = re.findall(r'^minimax_(\w+)\{model_name="(?:[^"\\]|\\.)*"(?:\}|,(.*)\}) (\S+)$', self.get("/metrics").decode(), re.M)
        return {name + (f"{{{labels}}}" if labels else ""): float(value) for name, labels, value in found}

    def post(self, path, body, status=200, headers={}):
        got, _, data = self.request("POST", path, body, headers)
        assert got == status, (path, body, got, data)
        return json.loads(data)

    def events(self, path, body):
        """The data of the events of a stream, without [DONE], which must be the last."""
        status, headers, data = self.request("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), (status, data)
        parts = data.decode().split("\n\n")
        assert parts.pop() == "" and parts.pop() == "data: [DONE]", data
        return [json.loads(p.removeprefix("data: ")) for p in parts]
