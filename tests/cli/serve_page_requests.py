#!/usr/bin/env python3
"""What the page of minimax-serve asks, its script run by node with elements that do nothing: a server of every --compat answers its messages, and
its status speaks of the server also where the key that was typed can stand in no header."""
import json
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import TMP, Server, convert  # noqa: E402

if not shutil.which("node"):
    print("no node here")
    sys.exit(77)

PACKED = convert("tests/data/tiny-m2")
# Elements by their ids, which keep what is set; whatever else they are asked does nothing.
STAGE = """
(() => {
const blank = () => new Proxy(function () {}, {get: (t, k) => k in t ? t[k] : k === Symbol.toPrimitive ? () => "" : k === "length" ? 0 : blank(),
  set: (t, k, v) => (t[k] = v, true), apply: () => blank()});
const element = {};
const named = id => element[id] ||= Object.assign(Object.create(blank()), {value: "", textContent: "", replaceChildren(...x) { this.textContent = x.map(e => e.textContent).join(", "); },
  scrollHeight: 0, scrollTop: 0, clientHeight: 0});
const plain = fetch;
Object.assign(globalThis, {window: {}, document: {getElementById: named, createElement: () => ({}), addEventListener() {}},
  fetch: (path, o) => plain("http://127.0.0.1:PORT" + path, o)});
})();
"""
ASK = """
const reply = {role: "assistant", content: ""}, shown = {reasoning() {}, thought() {}, content() {}, call() {}, article: {isConnected: false}};
$("max").value = "4"; $("key").value = KEY;
setTimeout(async () => {
  let why = null;
  try { await exchange(request([{role: "user", content: "hello"}]), shown, new AbortController().signal, reply, []); } catch (e) { why = e.message; }
  await new Promise(done => setTimeout(done, 2500)); // the status is written every two seconds
  console.log(JSON.stringify({why, said: (reply.reasoning_content || "") + reply.content, status: $("status").textContent}));
  process.exit(0);
}, 100);
"""


def ask(server, key=""):
    page = server.get("/").decode()
    script = re.search(r"<script>\n(.*)</script>", page, re.S)[1]
    text = STAGE.replace("PORT", str(server.port)) + script + ASK.replace("KEY", json.dumps(key))
    path = os.path.join(TMP, "page.js")
    with open(path, "w") as f:
        f.write(text.replace('"use strict";', "", 1))
    done = subprocess.run(["node", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done
    return json.loads(done.stdout)


for word in ("openai", "vllm", "llama.cpp"):
    with Server(PACKED, "--chat-format", "minimax-m2", "--compat", word) as s:
        got = ask(s)
        assert got["why"] is None and got["said"] and got["status"].startswith("ready"), (word, got)
with Server(PACKED, "--chat-format", "minimax-m2") as s:
    got = ask(s, "ключ")
    assert got["why"] and got["status"].startswith("ready"), got
print("the page is answered by 3 servers")
