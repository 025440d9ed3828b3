#!/usr/bin/env python3
"""The page of minimax-serve in headless Chromium: it asks nobody but the server, a conversation streams, an error is shown, the status lives,
a reply of a conversation that was left goes nowhere, a turn that failed is taken out and offered again, nothing overflows, light and dark,
narrow and wide. Markdown becomes elements, hostile Markdown and HTML run nothing, and conversations stay in the browser: Regenerate, Edit,
Continue, Escape, results of tools. Screenshots go to PAGE_SHOTS, if that is set."""
import base64
import json
import os
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import TMP, Server, convert  # noqa: E402

chromium = shutil.which("chromium") or shutil.which("google-chrome")
if not chromium:
    print("no Chromium here")
    sys.exit(77)


class Browser:
    """Chrome's debugging protocol over two pipes."""

    def __init__(self):
        to_read, self.to = os.pipe()
        self.back, back_write = os.pipe()

        def pipes():
            a, b = os.dup(to_read), os.dup(back_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={TMP}/chromium", "about:blank"],
            preexec_fn=pipes, pass_fds=(3, 4, to_read, back_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.count, self.rest, self.session, self.asked = 0, b"", None, set()

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params, **({"sessionId": self.session} if self.session else {})}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.back, 1 << 16)
            one, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(one)
            if answer.get("method") == "Network.requestWillBeSent":
                self.asked.add(answer["params"]["request"]["url"])
            if answer.get("id") == self.count:
                assert "result" in answer, answer
                return answer["result"]

    def run(self, script):
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script):
        end = time.monotonic() + 60
        while not (value := self.run(script)):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value


def open_page(b, server):
    origin = f"http://127.0.0.1:{server.port}/"
    b.call("Page.navigate", url=origin)
    b.wait("typeof $ == 'function' && document.getElementById('status').innerText.startsWith('ready')")
    return origin


def submit(b, text, most=6):
    b.run("$('max').value = %d; $('temperature').value = 0; $('text').value = %s; $('form').requestSubmit(); 0" % (most, json.dumps(text)))


def idle(b):
    """Nothing runs, and the page says so."""
    return b.run("!running && !$('send').hidden && $('stop').hidden")


def said(b):
    return b.run("messages.map(m => m.role + ':' + (m.role == 'user' ? m.content : ''))")


def left(b):
    """New while a reply streams: neither the reply nor its end reaches the next conversation."""
    for at_once in (False, True):
        submit(b, "first", 4000)
        b.wait("document.querySelector('details div') && document.querySelector('details div').textContent.length > 5")
        b.run("$('clear').click(); 0")
        assert idle(b) and said(b) == [] and b.run("$('talk').textContent") == "", b.run("document.body.innerText")
        if at_once:
            submit(b, "second", 30)
            assert b.run("!!running && $('send').hidden")
            b.wait("!running")
        else:
            time.sleep(0.5)
        assert idle(b) and said(b) == ["user:second", "assistant:"] * at_once, said(b)
        assert "first" not in b.run("$('talk').textContent")
    submit(b, "third")
    b.wait("!running")
    assert said(b) == ["user:second", "assistant:", "user:third", "assistant:"], said(b)
    submit(b, "fourth", 4000)  # Stop keeps what has come, in its conversation
    b.wait("(document.querySelectorAll('details div')[2] || {textContent: ''}).textContent.length > 5")
    b.run("$('stop').click(); 0")
    b.wait("!running")
    assert said(b)[4:] == ["user:fourth", "assistant:"] and idle(b), said(b)
    b.run("$('clear').click(); 0")


def usage(b):
    """The status shows the pages that requests hold: prompts that are kept for later ones are not in use."""
    metrics = "".join(f'minimax_{name}{{model_name="m"}} {value}\n' for name, value in (("requests_running", 1), ("pages", 8), ("pages_free", 1), ("pages_cached", 5), ("kv_cache_usage", 0.25)))
    b.run("window.plain = fetch; window.fetch = (url, o) => url === '/metrics' ? Promise.resolve(new Response(%s)) : plain(url, o); 0" % json.dumps(metrics))
    b.wait("[...document.querySelectorAll('#status span')].some(s => s.textContent === '25 % of the cache in use')")
    b.run("window.fetch = plain; 0")


def failing(b):
    """A turn that fails is no part of the conversation: its text is in the box again, Retry sends it, and what follows is served."""
    def failure(text, words, kept):
        error = b.wait("!running && (document.querySelector('article.failed .error') || {}).textContent")
        assert words in error and said(b) == kept and idle(b), (error, said(b))
        assert b.run("$('text').value") == text and b.run("document.querySelectorAll('article.failed').length") == 2

    long = "In the beginning " * 3000
    submit(b, long)
    failure(long, "too long", [])
    submit(b, "short")
    b.wait("!running")
    assert said(b) == ["user:short", "assistant:"] and b.run("!document.querySelector('.failed') && $('text').value == ''")
    kept = said(b)
    submit(b, "again", -1)
    failure("again", "max_tokens", kept)
    b.run("document.querySelector('article.failed button').click(); 0")  # the same once more
    failure("again", "max_tokens", kept)
    b.run("$('max').value = 5; document.querySelector('article.failed button').click(); 0")
    b.wait("!running")
    assert said(b) == kept + ["user:again", "assistant:"] and b.run("!document.querySelector('.failed') && $('text').value == ''"), said(b)
    assert b.run("document.querySelectorAll('article').length") == 4
    kept = said(b)
    # The box has something else by then: it stays, and Retry sends the turn nevertheless.
    b.run("window.plain = fetch; $('max').value = 5; 0")
    b.run("window.fetch = (url, o) => !o || !o.body ? plain(url, o) : "
          "new Promise((_, no) => o.signal.addEventListener('abort', () => no(o.signal.reason))); 0")
    submit(b, "stopped")
    b.run("$('text').value = 'typed'; $('stop').click(); 0")
    failure("typed", "stopped", kept)
    b.run("window.fetch = plain; document.querySelector('article.failed button').click(); 0")
    b.wait("!running")
    assert said(b) == kept + ["user:stopped", "assistant:"] and b.run("$('text').value") == "typed"
    kept = said(b)
    half, late = "{choices: [{delta: {content: 'half'}}]}", "{error: {message: 'the time is over'}}"
    for reply, words in (("new Response('data: ' + JSON.stringify(%s) + '\\n\\n')" % half, "broken off"),
                         ("new Response('<html>', {status: 502, statusText: 'Bad'})", "502 Bad"), ("new Response('{}', {status: 500})", "500"),
                         ("Promise.reject(new TypeError('no network'))", "no network"),
                         ("new Response('data: ' + JSON.stringify(%s) + '\\n\\ndata: [DONE]\\n\\n')" % late, "the time is over")):
        b.run("window.fetch = (url, o) => o && o.body ? Promise.resolve(%s) : plain(url, o); 0" % reply)
        submit(b, "lost")
        failure("lost", words, kept)
    b.run("window.fetch = plain; $('clear').click(); $('text').value = ''; 0")
    assert b.run("$('talk').textContent") == "" and idle(b)


def shape(b, text):
    """The elements of Markdown, as tags with the text in them."""
    return b.run("(() => { const e = document.createElement('div'); growing(e)(%s); return [...e.children].map(x => x.innerHTML).join(''); })()" % json.dumps(text))


HOSTILE = ["<img src=x onerror=bad=1>", "<script>bad=1</script>", "[x](javascript:bad=1)", "[x](JaVaScRiPt:bad=1)", "[x](data:text/html,<script>)", "<svg/onload=bad=1>",
           "![i](https://evil.invalid/i.png)", "[a](https://a.invalid/\"onmouseover=\"bad=1)", "`<b>", "```<i>\n", "| a | <b> |\n|---|---|\n| <img src=//evil.invalid/i onerror=bad=1> | c |\n",
           "\n", "\n\n", "> ", "- ", "1. ", "  ", "**", "*", "_", "~~", "`", "```", "~~~\n", "|", "\\", "# ", "---\n", "[", "](", ")", "<", ">", "&lt;", "word", "https://a.invalid/x", "\u202e", "<!--"]


def markdown(b):
    """Markdown by example; what is hostile makes none but the known elements; text that grows ends as it would at once."""
    got = shape(b, "# A\nb **c** `d`\n\n- e\n  1. f\n- g\n\n| h | i |\n|---|---|\n| `j` | k\\|l |\n\n```c\n<m>\n\nn\n```\n> o\n\n[p](https://q.invalid/) <r>")
    for part in ("<h3>A</h3>", "<p>b <strong>c</strong> <code>d</code></p>", "<ul><li>e<ol start=\"1\"><li>f</li></ol></li><li>g</li></ul>", "<th>h</th><th>i</th>",
                 "<td><code>j</code></td><td>k|l</td>", "<span>c</span>", "<pre><code>&lt;m&gt;\n\nn</code></pre>", "<blockquote><p>o</p></blockquote>",
                 "<a href=\"https://q.invalid/\" target=\"_blank\" rel=\"noopener noreferrer\">p</a> &lt;r&gt;"):
        assert part in got, (part, got)
    wrong = b.run(r"""(async () => {
      const parts = %s, tags = new Set("DIV P STRONG EM S CODE PRE UL OL LI BLOCKQUOTE H3 H4 H5 H6 HR TABLE TR TH TD A SPAN BUTTON".split(" "));
      let seed = 7;
      const next = n => (seed = seed * 1103515245 + 12345 & 0x7fffffff) %% n;
      for (let round = 0; round < 400; round++) {
        const text = Array.from({length: next(25)}, () => parts[next(parts.length)] + (next(3) ? "" : " ")).join("");
        const whole = document.body.appendChild(document.createElement("div")), grown = document.createElement("div"), grow = growing(grown);
        growing(whole)(text);
        for (let n = 0; n < text.length; n += 1 + next(9)) grow(text.slice(0, n));
        grow(text);
        const html = e => [...e.children].map(x => x.innerHTML).join("");
        if (html(whole) !== html(grown)) return "grown: " + JSON.stringify(text);
        for (const e of whole.querySelectorAll("*")) {
          if (!tags.has(e.tagName)) return e.tagName + " " + JSON.stringify(text);
          for (const a of e.attributes)
            if (!["class", "start", "type", "href", "target", "rel"].includes(a.name) || (a.name === "href" && !/^(https?|mailto):/.test(e.href))) return a.name + " " + JSON.stringify(text);
        }
        whole.remove();
      }
      await new Promise(r => setTimeout(r, 100));
      return window.bad ? "a script ran" : null;
    })()""" % json.dumps(HOSTILE))
    assert wrong is None, wrong
    for text in ("*a " * 20000, "`" * 30001, "[" * 30000, "> " * 20000, "- " * 20000, "[a](" * 10000, "_a" * 20000, "|" * 20000 + "\n|-", "#" * 30000, "* " * 30000 + "x", "1. " * 20000,
                 "**a" * 20000, "\\" * 30000, "a " * 30000 + "https://a.invalid" * 2000, "- - " * 9999 + "x\n" * 9999):
        took = b.run("(() => { const t = performance.now(); growing(document.createElement('div'))(%s); return performance.now() - t; })()" % json.dumps(text))
        assert took < 5000, (text[:20], took)


def fake(b, *replies, wait=0):
    """The next replies' deltas, each `wait` ms after the one before; the requests' bodies are in `bodies`."""
    b.run("window.plain ||= fetch; window.bodies = []; window.next = %s; 0" % json.dumps([
        "".join("data: " + json.dumps({"choices": [{"delta": d}]}) + "\n\n" for d in r) + 'data: {"choices": [{"delta": {}, "finish_reason": "length"}], "usage": {"completion_tokens": %d, "completion_tokens_details": {"reasoning_tokens": 7}}}\n\ndata: [DONE]\n\n' % (len(r) if wait else 9)
        for r in replies]))
    b.run("""window.slowly = text => new Response(new ReadableStream({async start(c) {
      for (const part of text.split(/(?<=\\n\\n)/)) { c.enqueue(new TextEncoder().encode(part)); await new Promise(r => setTimeout(r, %d)); }
      c.close();
    }})); 0""" % wait)
    b.run("window.fetch = (url, o) => o && o.body ? (bodies.push(JSON.parse(o.body)), Promise.resolve(next.length ? %s(next.shift()) : new Response('{}', {status: 500}))) : plain(url, o); 0" % ("slowly" if wait else "new Response"))


def press(b, name):
    b.run("[...document.querySelectorAll('footer button, article.failed button')].filter(x => x.textContent == %s).at(-1).click(); 0" % json.dumps(name))
    b.wait("!running")


def shown(b):
    return b.run("[...document.querySelectorAll('article')].map(a => a.innerText.trim())")


def conversations(b):
    """Regenerate, Edit, Continue, results of tools; a failure brings back what was there; the list opens, deletes."""
    b.run("localStorage.clear(); $('clear').click(); $('system').value = 'Be brief.'; $('top_p').value = .5; $('thinking').value = 'off'; 0")
    fake(b, [{"reasoning_content": "think"}, {"content": "**one"}, {"content": "**"}], [{"content": "two"}], [{"content": "s more"}])
    submit(b, "first", 9)
    b.wait("!running")
    body = b.run("bodies[0]")
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "first"}] and body["top_p"] == 0.5
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["temperature"] == 0
    assert b.run("document.querySelector('article strong').textContent") == "one"
    assert b.run("document.querySelector('summary').textContent") == "Reasoning 0 s, 7 tokens"  # as the usage says, whatever pieces came
    foot = b.run("[...document.querySelectorAll('footer')].at(-1).textContent")
    assert foot.startswith("CopyRegenerateContinue9 tokens, ") and foot.endswith("tokens/s, length"), foot
    press(b, "Regenerate")
    assert shown(b) == ["first", "two"] and b.run("bodies[1].messages.length") == 2
    press(b, "Continue")
    assert shown(b) == ["first", "twos more"] and b.run("messages[1].content") == "twos more"
    assert b.run("bodies[2].continue_final_message && !bodies[2].add_generation_prompt && bodies[2].messages.at(-1).content == 'two' && !('meta' in bodies[2].messages.at(-1))")
    for name in ("Regenerate", "Continue"):  # fails: the reply is there still
        press(b, name)
        assert shown(b)[:2] == ["first", "twos more"] and b.run("!!document.querySelector('.error')") and len(b.run("messages")) == 2
    fake(b, [{"content": "three"}], [{"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}]}])
    press(b, "Edit")
    assert b.run("$('text').value") == "first" and b.run("document.querySelectorAll('section.cut').length") == 2
    b.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'})); 0")
    assert b.run("document.querySelectorAll('section.cut').length") == 0 and b.run("$('text').value") == ""
    press(b, "Edit")
    submit(b, "changed", 9)
    b.wait("!running")
    assert shown(b) == ["changed", "three"]
    submit(b, "use a tool", 9)
    b.wait("!running")
    b.run("window.box = document.querySelector('footer textarea'); box.value = '42'; box.dispatchEvent(new Event('input')); 0")
    for name in ("Send results", "Regenerate"):  # fails: the result is in its box still
        press(b, name)
        assert b.run("!!document.querySelector('.error')") and b.run("document.querySelector('footer textarea').value") == "42", name
    fake(b, [{"content": "five"}])
    press(b, "Send results")
    assert b.run("bodies[0].messages.at(-1)") == {"role": "tool", "tool_call_id": "c1", "content": "42"} and shown(b)[-2:] == ["Result: 42", "five"]
    first = shown(b)
    b.run("$('clear').click(); 0")
    fake(b, [{"content": "other"}])
    submit(b, "second", 9)
    b.wait("!running")
    b.run("$('chats').click(); 0")
    assert b.run("[...document.querySelectorAll('#list p')].map(p => p.firstChild.textContent)") == ["second", "changed"]
    b.run("document.querySelectorAll('#list p')[1].firstChild.click(); 0")
    assert [x.replace("\n", "") for x in shown(b)] == [x.replace("\n", "") for x in first] and b.run("$('list').hidden"), shown(b)
    b.run("$('chats').click(); document.querySelectorAll('#list p')[0].lastChild.click(); 0")
    assert b.run("saved().map(c => c.title)") == ["changed"]
    b.run("localStorage.setItem('chats', '{'); 0")
    assert b.run("saved()") == []
    b.run("window.kept = Storage.prototype.setItem; 0")
    # Something else under that name, and a browser that keeps nothing, stop no conversation.
    for other in ('{"a": 1}', "5", "[null]", '[1, {"id": 1}]', '[{"id": 1, "messages": [null]}]', '[{"id": 1, "messages": [{"role": "user"}]}]', None):
        b.run("localStorage.clear(); $('clear').click(); 0")
        b.run("localStorage.setItem('chats', %s); 0" % json.dumps(other) if other else "Storage.prototype.setItem = () => { throw new Error('full'); }; 0")
        fake(b, [{"content": "kept"}])
        submit(b, "stored", 9)
        b.wait("!running")
        assert said(b) == ["user:stored", "assistant:"] and idle(b), other
        b.run("$('chats').click(); 0")
        assert b.run("[...document.querySelectorAll('#list p')].map(p => p.firstChild.textContent)") == ["stored"] * bool(other), other
        b.run("$('chats').click(); 0")
    b.run("Storage.prototype.setItem = kept; $('clear').click(); 0")
    # Without room the oldest conversations go.
    b.run("localStorage.clear(); for (let n = 0; n < 4; n++) save({id: n, messages: [{role: 'user', content: n + 'x'.repeat(2e6)}]}); 0")
    assert b.run("saved().map(c => c.id)") in ([3, 2], [3]), b.run("saved().map(c => c.id)")
    b.run("localStorage.clear(); window.fetch = plain; for (const i of ['system', 'top_p', 'thinking', 'text']) $(i).value = ''; $('clear').click(); 0")
    # Escape ends a reply of the server; Continue goes on from it.
    submit(b, "go on", 4000)
    b.wait("(document.querySelector('details div') || {textContent: ''}).textContent.length > 5")
    b.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'})); 0")
    b.wait("!running")
    assert b.run("messages[1].meta") == "stopped" and idle(b)
    b.run("$('clear').click(); 0")


WANDER = r"""(async () => {
  let seed = %d, count = 0, hanging = null;
  const next = n => (seed = seed * 1103515245 + 12345 & 0x7fffffff) >> 8, pick = n => next() %% n, gone = new Set(), log = [];
  const wait = async () => { for (let i = 0; i < 4; i++) await new Promise(r => { const c = new MessageChannel(); c.port1.onmessage = r; c.port2.postMessage(0); }); };
  const data = x => new TextEncoder().encode("data: " + (typeof x === "string" ? x : JSON.stringify(x)) + "\n\n");
  window.plain ||= fetch;
  window.fetch = async (url, o) => {
    if (!o || !o.body) return plain(url, o);
    const text = JSON.parse(o.body).messages.at(-1).content;
    if (text.startsWith("bad")) return new Response("{}", {status: 500});
    return new Response(new ReadableStream({start(c) {
      if (pick(3)) c.enqueue(data({choices: [{delta: {content: "r" + count++}}]}));
      const end = () => { c.enqueue(data({choices: [{delta: {content: "!"}, finish_reason: "stop"}]})); c.enqueue(data("[DONE]")); c.close(); };
      if (!text.startsWith("slow")) return end();
      hanging = end;
      o.signal.addEventListener("abort", () => { hanging = null; c.error(o.signal.reason); });
    }}));
  };
  const foot = name => { const all = [...document.querySelectorAll("footer button, article.failed button")].filter(b => b.textContent === name); all.length && all[pick(all.length)].click(); };
  const listed = which => { $("chats").click(); if ($("list").hidden) $("chats").click(); const p = [...$("list").querySelectorAll("p")]; return p.length ? p[pick(p.length)].querySelectorAll("button")[which] : null; };
  const acts = {
    send() { $("text").value = ["good", "bad", "slow", "slow"][pick(4)] + count++; $("form").requestSubmit(); },
    stop() { $("stop").click(); }, release() { if (hanging) hanging(); hanging = null; }, new() { $("clear").click(); }, enter() { listed(0)?.click(); },
    delete() { const b = listed(2), n = [...$("list").querySelectorAll("button")].indexOf(b); if (b) { gone.add(saved()[(n - 2) / 3].id); b.click(); } },
    edit() { foot("Edit"); }, again() { foot("Regenerate"); }, more() { foot("Continue"); }, retry() { foot("Retry"); },
    keep() { $("form").requestSubmit(); }, escape() { document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"})); }};
  const wrong = () => {
    if (running) return null;
    const sections = [...$("talk").children].filter(s => !s.querySelector("article.failed"));
    if (rows.length !== messages.length || sections.some((s, n) => s !== rows[n]) || sections.length !== rows.length) return "rows are not the messages";
    for (const [n, m] of messages.entries()) {
      if (m.role !== (n %% 2 ? "assistant" : "user")) return "roles";
      if (String(m.content).startsWith("bad")) return "a turn that failed is in the conversation";
      if (rows[n].querySelector("article").textContent !== m.content) return "row " + n + " is " + rows[n].querySelector("article").textContent + ", not " + m.content;
    }
    const cut = rows.map(r => r.classList.contains("cut"));
    if (cut.some((c, n) => c !== (edited !== null && n >= edited))) return "marks of what an edit replaces";
    const own = saved().find(c => c.id === chat.id);
    if (messages.length && JSON.stringify(own?.messages) !== JSON.stringify(messages)) return "the saved conversation";
    if (saved().some(c => gone.has(c.id))) return "a deleted conversation came back";
    if (new Set(saved().map(c => c.id)).size !== saved().length) return "two of one number";
    return document.querySelector("article.failed") && messages.some(m => m.role === "user" && m.content === $("text").value) && edited === null ? "a text that is still there is in the box" : null;
  };
  for (let step = 0; step < %d; step++) {
    const names = Object.keys(acts), name = names[pick(names.length)];
    acts[name]();
    log.push(name);
    await wait();
    const why = wrong();
    if (why) return why + " after " + log.slice(-12);
  }
  if (hanging) hanging();
  await wait();
  window.fetch = plain;
  localStorage.clear();
  $("clear").click();
  $("text").value = "";
  return wrong();
})()"""


def keyboard(b):
    """By keys alone: a message of two lines is sent, Escape ends the reply, Tab and Enter begin a new conversation."""
    def key(name, code, modifiers=0):
        for kind in ("keyDown", "keyUp"):
            b.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, modifiers=modifiers,
                   **({"text": "\r"} if name == "Enter" and kind == "keyDown" else {}))

    b.run("$('max').value = 4000; $('temperature').value = 0; $('text').focus(); 0")
    b.call("Input.insertText", text="one")
    key("Enter", 13, 8)  # with Shift
    b.call("Input.insertText", text="two")
    key("Enter", 13)
    b.wait("(document.querySelector('details div') || {textContent: ''}).textContent.length > 5")
    key("Escape", 27)
    b.wait("!running")
    assert said(b) == ["user:one\ntwo", "assistant:"] and b.run("messages[1].meta") == "stopped" and idle(b)
    for there in ("send", "clear"):
        key("Tab", 9)
        assert b.run("document.activeElement.id") == there
    key("Enter", 13)
    assert said(b) == [] and b.run("document.activeElement.id") == "text"


def wander(b, seed, steps):
    """Random sequences of what a user may press, while replies come, fail or hang: the page shows the conversation that is sent and saved."""
    b.run("$('max').value = 9; localStorage.clear(); $('clear').click(); 0")
    why = b.run(WANDER % (seed, steps))
    assert why is None, why


def tabs(b, server):
    """A conversation in two tabs: what each adds is kept, and what one deletes does not come back with the other's reply."""
    first, titles = b.session, "saved().map(c => [c.title, c.messages.map(m => m.content).join()])"
    b.run("localStorage.clear(); $('clear').click(); 0")
    fake(b, [{"content": "one"}], [{"content": "two"}])
    submit(b, "a", 9)
    b.wait("!running")
    target = b.call("Target.createTarget", url="about:blank")["targetId"]
    b.session = second = b.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    open_page(b, server)
    fake(b, [{"content": "three"}])
    b.run("$('chats').click(); document.querySelector('#list button').click(); 0")
    assert shown(b) == ["a", "one"]
    b.session = first
    submit(b, "b", 9)
    b.wait("!running")
    b.session = second
    b.wait("saved()[0].messages.length == 4")  # a browser tells its tabs of each other's changes after a moment
    submit(b, "c", 9)
    b.wait("!running")
    assert sorted(b.run(titles)) == [["a", "a,one,b,two"], ["a", "a,one,c,three"]], b.run(titles)
    # The first tab's reply hangs; the second deletes that conversation, and its own one.
    b.session = first
    b.wait("saved().length == 2")
    b.run("window.fetch = (url, o) => !o || !o.body ? plain(url, o) : new Promise(r => window.answer = r); 0")
    submit(b, "d", 9)
    b.session = second
    for _ in range(2):
        b.run("$('chats').click(); document.querySelector('#list p').lastChild.click(); $('chats').click(); 0")
    b.session = first
    b.wait("!saved().length")
    b.run("answer(new Response('data: ' + JSON.stringify({choices: [{delta: {content: 'four'}}]}) + '\\n\\ndata: [DONE]\\n\\n')); 0")
    b.wait("!running")
    assert b.run(titles) == [] and shown(b)[-1] == "four", b.run(titles)
    fake(b, [{"content": "five"}])
    submit(b, "e", 9)  # whoever goes on with it keeps it
    b.wait("!running")
    assert b.run(titles) == [["a", "a,one,b,two,d,four,e,five"]], b.run(titles)
    assert len({b.run("named()") for _ in range(3)}) == 3
    b.run("localStorage.clear(); window.fetch = plain; $('clear').click(); 0")
    b.call("Target.closeTarget", targetId=target)


def reloaded(b, server):
    """A page that is loaded again while a reply streams has kept what came."""
    b.run("localStorage.clear(); $('clear').click(); 0")
    submit(b, "kept", 4000)
    b.wait("(document.querySelector('details div') || {textContent: ''}).textContent.length > 5")
    open_page(b, server)
    kept, = b.run("saved()")
    assert [m["role"] for m in kept["messages"]] == ["user", "assistant"] and kept["messages"][0]["content"] == "kept" and len(kept["messages"][1]["reasoning_content"]) > 5, kept
    # Also of a later turn, and what was to replace a reply or to go on with it, once it has begun.
    old = [{"role": "user", "content": "kept"}, {"role": "assistant", "content": "In the"}]
    for act, begun, count in (("send('more')", "document.querySelector('details div')", 4), ("regenerate()", "document.querySelector('details div')", 2),
                              ("proceed()", "$('talk').textContent.length > 30", 2)):
        b.run(f"put('localStorage', 'chats', JSON.stringify([{{id: 1, messages: {json.dumps(old)}}}])); $('clear').click(); visit(1); 0")
        b.run(f"$('max').value = 4000; {act}; 0")
        b.wait(f"Boolean({begun})")
        open_page(b, server)
        kept, = b.run("saved()")
        last = kept["messages"][-1]
        assert len(kept["messages"]) == count and last.get("meta") == "stopped", (act, kept)
        assert last["content"].startswith("In the") and len(last["content"]) > 6 if act == "proceed()" else last["reasoning_content"], (act, kept)
    b.run("localStorage.clear(); 0")


def mistyped(b, packed):
    """A key that is wrong at first. Where /metrics is off, the status says no more than that the server is ready."""
    with Server(packed, "--chat-format", "minimax-m2", "--max-model-len", "256", "--api-key", "right", "--metric-names", "none") as server:
        open_page(b, server)
        assert b.run("$('status').innerText") == "ready", b.run("$('status').innerText")
        b.run("$('key').value = 'wrong'; 0")
        submit(b, "hello")
        assert "key" in b.wait("!running && (document.querySelector('article.failed .error') || {}).textContent") and said(b) == []
        b.run("$('key').value = 'right'; document.querySelector('article.failed button').click(); 0")
        b.wait("!running")
        assert said(b) == ["user:hello", "assistant:"] and b.run("sessionStorage.getItem('key')") == "right"
        b.run("$('key').value = ''; sessionStorage.clear(); 0")


PACKED = convert("tests/data/tiny-m2")
with Server(PACKED, "--chat-format", "minimax-m2") as server:
    b = Browser()
    target = b.call("Target.createTarget", url="about:blank")["targetId"]
    b.session = b.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    b.call("Network.enable")
    b.call("Page.enable")
    origin = open_page(b, server)
    b.wait("$('model').textContent == 'tiny-m2'")
    b.run("$('max').value = 40; $('temperature').value = 0; $('text').value = 'In the <b>beginning</b>'; $('form').requestSubmit(); 0")
    b.wait("messages.length == 2 && !running")
    assert b.run("document.querySelector('article.user').textContent") == "In the <b>beginning</b>"
    assert len(b.run("document.querySelector('details div').textContent")) > 10 and b.run("document.querySelector('details').open") is False
    b.run("$('temperature').value = 0; $('max').value = -1; $('text').value = 'again'; $('form').noValidate = true; $('form').requestSubmit(); 0")
    assert "max_tokens" in b.wait("(document.querySelector('.error') || {}).textContent")
    b.run("$('clear').click(); 0")
    left(b)
    usage(b)
    failing(b)
    markdown(b)
    conversations(b)
    tabs(b, server)
    reloaded(b, server)
    keyboard(b)
    wander(b, *(int(x) for x in (sys.argv[1:] + ["7", "120"][len(sys.argv) - 1:])[:2]))
    # A reply that is held to a call of a tool that the page has.
    think = server.post("/tokenize", {"prompt": "</think>", "parse_special": True})["tokens"][0]
    held = {"guided_choice": ["\n\nLook.\n<minimax:tool_call>\n<invoke name=\"find\">\n<parameter name=\"what\">Ur &lt;é</parameter>\n</invoke>\n</minimax:tool_call>"],
            "logit_bias": {think: 100}}
    b.run("const ask = fetch; window.fetch = (url, o) => ask(url, o && o.body ? {...o, body: JSON.stringify({...JSON.parse(o.body), ...%s})} : o); 0" % json.dumps(held))
    b.run("$('clear').click(); $('max').value = 400; $('tools').value = JSON.stringify([{type: 'function', function: {name: 'find', parameters: {type: 'object', "
          "properties: {what: {type: 'string'}}}}}]); $('tools').parentNode.open = true; $('text').value = 'look'; $('form').requestSubmit(); 0")
    b.wait("messages.length == 2 && !running")
    assert b.run("document.querySelector('pre').textContent") == 'find {"what": "Ur &lt;é"}', b.run("document.body.innerText")
    assert b.run("messages[1].tool_calls[0].function.name") == "find" and b.run("messages[1].content") == "Look."
    # Cut off within the call's arguments: the history goes on without it.
    ask = {"messages": [{"role": "user", "content": "look"}], "temperature": 0, **held,
           "tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}}}]}
    cut = next(n for n in range(1, 400) for m in [server.post("/v1/chat/completions", {**ask, "max_tokens": n})["choices"][0]["message"]]
               if m.get("tool_calls") and m["tool_calls"][0]["function"]["arguments"])
    b.run("$('clear').click(); $('max').value = %d; $('text').value = 'look'; $('form').requestSubmit(); 0" % cut)
    b.wait("messages.length == 2 && !running")
    assert b.run("!!document.querySelector('pre') && !messages[1].tool_calls"), b.run("document.body.innerText")
    b.run("$('text').value = 'again'; $('form').requestSubmit(); 0")
    b.wait("messages.length == 4 && !running")
    assert b.run("!document.querySelector('.error')"), b.run("document.body.innerText")
    b.run("$('tools').value = '['; $('text').value = 'x'; $('form').requestSubmit(); 0")
    assert "Tools: " in b.wait("(document.querySelector('.error') || {}).textContent")
    for scheme in ("light", "dark"):
        b.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for width in (360, 1280):
            b.call("Emulation.setDeviceMetricsOverride", width=width, height=720, deviceScaleFactor=1, mobile=False)
            assert b.run("document.documentElement.scrollWidth <= innerWidth"), (scheme, width)
            if os.environ.get("PAGE_SHOTS"):
                with open(f"{os.environ['PAGE_SHOTS']}/{scheme}-{width}.png", "wb") as f:
                    f.write(base64.b64decode(b.call("Page.captureScreenshot")["data"]))
    sample = ("## Result\n\nThe *first* rows, by `sort -n`:\n\n| name | tokens/s |\n|---|---|\n| prompt | 1,024 |\n| reply | 57.5 |\n\n```python\nfor n in range(3):\n"
              "    print(n)  # <b>no HTML</b>\n```\n\n1. **Unpack** it\n   - with `tar`\n2. Run it\n\n> quoted\n\nSee [the manual](https://example.invalid/).")
    b.run("window.tools = 0; $('clear').click(); $('tools').value = ''; $('tools').parentNode.open = false; 0")
    fake(b, [{"reasoning_content": w} for w in ("Look", " at", " the", " rows", ".")] + [{"content": sample[n : n + 4]} for n in range(0, len(sample), 4)], wait=10)
    submit(b, "Show me a table", 400)
    b.wait("!running")
    for scheme, width in (("light", 1280), ("dark", 390)):
        b.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        b.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert b.run("document.documentElement.scrollWidth <= innerWidth"), (scheme, width)
        if os.environ.get("PAGE_SHOTS"):
            with open(f"{os.environ['PAGE_SHOTS']}/markdown-{scheme}-{width}.png", "wb") as f:
                f.write(base64.b64decode(b.call("Page.captureScreenshot")["data"]))
    b.run("window.fetch = plain; $('clear').click(); 0")
    b.run("$('details'), document.querySelector('details').open = true; 0")
    b.asked, asked = set(), b.asked
    mistyped(b, PACKED)
    b.asked = asked
    others = {u for u in b.asked if not u.startswith(origin)}
    assert b.asked and not others, others
    b.process.terminate()
    b.process.wait(20)
print("a conversation streams, errors show, nothing overflows, and nobody else is asked")
