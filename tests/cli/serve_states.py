#!/usr/bin/env python3
"""Lightning states that minimax-serve keeps of prompts: what one result of a tool more, a reply that the request began, and other questions behind the
same system message compute. All by the tokens that usage calls cached, and by rows."""
import concurrent.futures
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import Server, convert  # noqa: E402

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PACKED = convert("tests/data/tiny-m1")
TOP = json.load(open(PACKED + "/config.json", encoding="utf-8"))["num_experts_per_tok"]
LONG = "And the LORD spake unto Moses, saying, Speak unto the children of Israel. " * 6


def used(s, path, **body):
    """(tokens of the prompt, those that were cached)"""
    u = s.post(path, {"max_tokens": 2, **body})["usage"]
    if path == MESSAGES:
        return u["input_tokens"] + u["cache_read_input_tokens"], u["cache_read_input_tokens"]
    return u["prompt_tokens"], u["prompt_tokens_details"]["cached_tokens"]


def rows(s):
    time.sleep(0.2)  # the server counts once a second while it runs, and when nothing does
    return max(sum(layer) for layer in json.loads(s.get("/expert_load"))["load"]) / TOP


def loop(s):
    """Calls as the client writes them, not as they were sampled: each turn computes them and their results, and nothing that stands before them."""
    tools, last = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], 0
    messages = [{"role": "user", "content": "In the beginning"}]
    for i in range(5):
        total, cached = used(s, CHAT, messages=messages, tools=tools)
        assert last - 10 <= cached <= last, (i, total, cached, last)
        last = total
        messages += [{"role": "assistant", "content": None, "tool_calls": [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": i})}}]},
                     {"role": "tool", "tool_call_id": f"c{i}", "content": LONG}]


def begun(s):
    """The beginning of a reply that the request has is read once, for several choices and when it comes again."""
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": LONG + "So"}]
    before = rows(s)
    total, _ = used(s, CHAT, messages=messages, n=5, add_generation_prompt=False, continue_final_message=True, ignore_eos=True)
    assert rows(s) - before <= total + 5 * 3, (total, rows(s) - before)
    assert used(s, CHAT, messages=messages, add_generation_prompt=False, continue_final_message=True) == (total, total - 1)
    messages[1]["content"] = "But " + messages[1]["content"]
    assert used(s, MESSAGES, messages=messages)[1] < 100
    total, cached = used(s, MESSAGES, messages=messages)
    assert cached == total - 1, (total, cached)


def questions(s):
    """Behind a common system message: the second question parts from the first, and from then on its place is known; of several at once one reads it."""
    def ask(i, system):
        return used(s, CHAT, messages=[{"role": "system", "content": system}, {"role": "user", "content": f"{i} is the question"}])

    found = [ask(i, "One. " + LONG) for i in range(4)]
    common = found[0][0] - 20
    assert found[1][1] < common and all(cached >= common for _, cached in found[2:]), found
    before = rows(s)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: ask(i, "Two. " + LONG), range(8)))
    assert rows(s) - before <= common + 8 * 40, (common, rows(s) - before, together)


with Server(PACKED, "--chat-format", "minimax-m1", "--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "-t", "1") as server:
    loop(server)
    begun(server)
    questions(server)
print("states of tool loops, of begun replies, and where prompts part")
