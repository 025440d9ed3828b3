#!/usr/bin/env python3
"""minimax-serve over plain HTTP: completions whole and streamed, stop strings over the borders of tokens, sampling fields, errors, the
pages for operators, and how it ends."""
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server, convert  # noqa: E402

COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": "In the beginning", "temperature": 0}


def run(packed, n):
    done = subprocess.run([f"{BIN}/minimax-run", packed, "-p", PROMPT["prompt"], "-n", str(n), "-q"], check=True, capture_output=True)
    return done.stdout.decode()[:-1]


def completions(s, packed):
    text = run(packed, 40)
    whole = s.post(COMPLETIONS, {**PROMPT, "max_tokens": 40})
    choice = whole["choices"][0]
    assert choice["text"] == text and choice["finish_reason"] == "length", choice
    assert whole["usage"]["completion_tokens"] == 40 and whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 40
    events = s.events(COMPLETIONS, {**PROMPT, "max_tokens": 40, "stream_options": {"include_usage": True}})
    assert "".join(c["text"] for e in events for c in e["choices"]) == text
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["length"]
    assert [e["usage"]["completion_tokens"] for e in events if e["usage"]] == [40] and events[-1]["choices"] == []
    ids = s.post("/tokenize", {"prompt": PROMPT["prompt"]})["tokens"]
    assert s.post(COMPLETIONS, {**PROMPT, "prompt": ids, "max_tokens": 40})["choices"][0]["text"] == text
    assert s.post("/detokenize", {"tokens": ids})["prompt"] == PROMPT["prompt"]
    two = s.post(COMPLETIONS, {**PROMPT, "prompt": [PROMPT["prompt"], "And God"], "n": 2, "max_tokens": 8, "echo": True})["choices"]
    assert [c["index"] for c in two] == [0, 1, 2, 3] and two[0]["text"] == two[1]["text"] == PROMPT["prompt"] + run(packed, 8)
    assert two[2]["text"].startswith("And God")


def ended(text, stops):
    """The text before the stop string that ends first, of several the longest, and that one."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], max(found, key=len)


def stops(s, packed):
    """A stop string may begin and end anywhere in a token; of several that one counts which would end first byte by byte, wherever tokens
    end; streamed pieces never hold what is cut later."""
    text = run(packed, 40)
    for begin in range(3, len(text) - 12, 7):
        for length in (1, 2, 5, 12):
            stop = text[begin : begin + length]
            want = text[: text.index(stop)]
            body = {**PROMPT, "max_tokens": 40, "stop": ["not in the text", stop]}
            choice = s.post(COMPLETIONS, body)["choices"][0]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (want, "stop", stop), (stop, choice)
        nested = [text[begin : begin + 9], text[begin + 2 : begin + 4]]
        choice = s.post(COMPLETIONS, {**PROMPT, "max_tokens": 40, "stop": nested})["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ended(text, nested), (nested, choice)
    pieces = s.events(COMPLETIONS, {**PROMPT, "max_tokens": 40, "stop": stop})
    assert "".join(c["text"] for e in pieces for c in e["choices"]) == want
    kept = s.post(COMPLETIONS, {**PROMPT, "max_tokens": 40, "stop": stop, "include_stop_str_in_output": True})["choices"][0]
    assert kept["text"] == want + stop
    # As in vLLM the token of stop_token_ids is kept too, unless it is a control token that is not shown.
    first, own = (s.post("/tokenize", {"prompt": x, "parse_special": True})["tokens"][0] for x in (" of", "[e~["))
    for body, texts in (({"stop_token_ids": [first]}, ("", " of", " of")), ({"logit_bias": {str(own): 100}}, ("", "", "[e~["))):
        for more, text in zip(({}, {"include_stop_str_in_output": True}, {"include_stop_str_in_output": True, "skip_special_tokens": False}), texts):
            asked = {**PROMPT, "max_tokens": 4, **body, **more}
            assert s.post(COMPLETIONS, asked)["choices"][0]["text"] == text == "".join(c["text"] for e in s.events(COMPLETIONS, asked) for c in e["choices"]), asked


def sampling(s):
    hot = {"prompt": "And God", "temperature": 1.5, "max_tokens": 24}
    a, b, c = (s.post(COMPLETIONS, {**hot, "seed": seed})["choices"][0]["text"] for seed in (7, 7, 8))
    assert a == b != c
    assert len({s.post(COMPLETIONS, hot)["choices"][0]["text"] for _ in range(4)}) > 1
    assert len({x["text"] for x in s.post(COMPLETIONS, {**hot, "n": 4, "seed": 7})["choices"]}) == 4
    first = s.post("/tokenize", {"prompt": " of"})["tokens"][0]
    plain, banned = (s.post(COMPLETIONS, {**PROMPT, "max_tokens": 1, "logit_bias": {str(first): x}})["choices"][0]["text"] for x in (0, -100))
    assert plain == " of" != banned
    got = s.post(COMPLETIONS, {**PROMPT, "max_tokens": 3, "logprobs": 2})["choices"][0]["logprobs"]
    assert "".join(got["tokens"]) == run(PACKED, 3) and got["text_offset"][0] == 0
    assert all(lp < 0 and top[t] == lp == max(top.values()) for t, lp, top in zip(got["tokens"], got["token_logprobs"], got["top_logprobs"]))


def errors(s):
    for body, param in [
        ("", None), ("[]", None), ("{", None), ('{"prompt": "a"} x', None), ('{"prompt": "\\x"}', None), ("[" * 5000, None), (b"\xff", None),
        ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [1 << 40]}, "prompt"), ({"prompt": ["a", 1]}, "prompt"),
        ({**PROMPT, "temperature": "hot"}, "temperature"), ({**PROMPT, "temperature": -1}, "temperature"), ({**PROMPT, "n": 0}, "n"),
        ({**PROMPT, "max_tokens": 10**30}, "max_tokens"), ({**PROMPT, "stop": [1]}, "stop"), ({**PROMPT, "stop": [""]}, "stop"),
        ({**PROMPT, "logit_bias": {"x": 1}}, "logit_bias"), ({**PROMPT, "stream": 1}, "stream"), ({**PROMPT, "suffix": "b"}, "suffix"),
        ({"prompt": [1] * 9000}, "prompt"), ('{"prompt":"a","temperature":NaN}', "temperature"),
    ]:
        error = s.post(COMPLETIONS, body, 400)["error"]
        assert error["type"] == "invalid_request_error" and error["param"] == param and error["message"], (body, error)
    assert s.post(COMPLETIONS, {**PROMPT, "model": "another"}, 404)["error"]["param"] == "model"
    assert s.post("/v1/nothing", {}, 404)["error"]["type"] == "not_found_error"
    assert s.request("GET", COMPLETIONS)[0] == 405 and s.request("PUT", "/health", "x")[0] == 405
    # As Python reads them: the last of equal keys, a number as an integer, a byte order mark, a lone surrogate.
    odd = b'\xef\xbb\xbf{"max_tokens": 1, "prompt": "\\ud800", "prompt": "In the beginning", "temperature": 0.0, "max_tokens": 3.0}'
    assert s.post(COMPLETIONS, odd)["choices"][0]["text"] == run(PACKED, 3)
    assert s.post(COMPLETIONS, {**PROMPT, "prompt": "x", "max_tokens": 1, "unknown": [[[{}]]]})["object"] == "text_completion"


def characters(s):
    """Offsets of logprobs count characters, whole and streamed: a byte that is none alone is shown as one of three bytes."""
    byte = next(i for i in range(2000) if s.post("/detokenize", {"tokens": [i, i]})["prompt"] == "\ufffd\ufffd")
    body = {**PROMPT, "max_tokens": 4, "logprobs": 1, "logit_bias": {str(byte): 100}}
    choice = s.post(COMPLETIONS, body)["choices"][0]
    assert choice["text"] == "\ufffd" * 4 and choice["logprobs"]["text_offset"] in ([0, 1, 2, 3], [0, 0, 1, 2]), choice
    assert [x for e in s.events(COMPLETIONS, body) for c in e["choices"] if c["logprobs"] for x in c["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]


def reasons(s):
    """stop_reason is the stop string or the id of stop_token_ids that ended the reply; of the checkpoint's own end it is null."""
    first = s.post("/tokenize", {"prompt": " of"})["tokens"][0]
    own = s.post("/tokenize", {"prompt": "[e~[", "parse_special": True})["tokens"][0]
    for more, reason in [({"stop_token_ids": [first]}, first), ({"logit_bias": {str(own): 100}}, None), ({"stop": " of"}, " of"),
                         ({"logit_bias": {str(own): 100}, "stop_token_ids": [own]}, None), ({"logit_bias": {str(own): 100}, "stop_token_ids": [own], "ignore_eos": True}, own)]:
        body = {**PROMPT, "max_tokens": 8, **more}
        choice, last = s.post(COMPLETIONS, body)["choices"][0], s.events(COMPLETIONS, body)[-1]["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == (last["finish_reason"], last["stop_reason"]) == ("stop", reason), (more, choice, last)


def unserved(s):
    """Fields of other servers that bind a reply are refused by name in every API, or ask for nothing."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    everywhere = {"structural_tag": {"type": "x"}, "min_tokens": 3, "grammar_lazy": True,
                  "bad_words": ["a"], "allowed_token_ids": [1], "truncate_prompt_tokens": 5, "chat_template": "x", "functions": [{"name": "f"}]}
    not_openai = {"guided_json": {"type": "object"}, "guided_regex": "a+", "guided_grammar": "root ::= x", "structured_outputs": {"regex": "a"}, "guided_choice": ["a", "b"]}
    fields = {"/v1/chat/completions": {"prompt_logprobs": 1}, COMPLETIONS: {"response_format": schema}}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for path, body in {COMPLETIONS: {**PROMPT, "max_tokens": 1}, "/v1/chat/completions": chat, "/v1/messages": chat, "/v1/responses": {"input": "x", "max_output_tokens": 1}}.items():
        for name, value in {**everywhere, **fields.get(path, {**not_openai, "response_format": schema, "prompt_logprobs": 1})}.items():
            assert name + ":" in s.post(path, {**body, name: value}, 400)["error"]["message"], (path, name)
    nothing = {**dict.fromkeys([*everywhere, *not_openai]), "grammar_lazy": False, "min_tokens": 0, "bad_words": [], "response_format": {"type": "text"}}
    assert s.post(COMPLETIONS, {**PROMPT, "max_tokens": 1, **nothing})["choices"][0]["text"] == run(PACKED, 1)


def edges(s):
    """The least and the most of every field are taken, what lies beyond is refused by the field's name."""
    one = {**PROMPT, "max_tokens": 1}
    wide, kept = 2**31, {"temperature": 1}
    fields = {
        "temperature": ([0, 1e6], [-1e-9, 1.1e6]), "top_p": ([0, 1], [-1e-9, 1.0000001]), "top_k": ([-1, 0, wide - 1], [-2, wide, 0.5]),
        "min_p": ([0, 1], [-1e-9, 1.0000001]), "presence_penalty": ([-2, 2], [-2.0001, 2.0001]), "repetition_penalty": ([0, 0.001, 1000], [-1e-9, 9e-4, 1000.1]),
        "frequency_penalty": ([-2, 2], [-2.0001, 2.0001]), "seed": ([-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]), "n": ([1], [0, wide]),
        "priority": ([-wide, wide - 1], [-wide - 1, wide]), "timeout": ([1e9], [0.0009, 1.1e9]),
        "logit_bias": ([{"0": 1}, {"9": 1}, {"2047": 1}, {"5": 100, "6": -100}, {}],
                       [{"2048": 1}, {"-1": 1}, {"+1": 1}, {" 1": 1}, {"/": 1}, {":": 1}, {"": 1}, {"1x": 1}, {"1": 100.1}, {"1": -100.1}, {"1": "1"},
                        {"1": 1, "2": 1, "01": 1}]),
        "stop_token_ids": ([[0], [2047], []], [[2048], [-1], [1.5]]), "max_tokens": ([1], [0, wide]),
        "stop": (["~" * 256, ["~%d" % i for i in range(16)], []], ["~" * 257, ["~%d" % i for i in range(17)], ["a", ""]]),
    }
    for name, (taken, refused) in fields.items():
        for value in taken:
            assert len(s.post(COMPLETIONS, {**one, **kept, name: value})["choices"]) == 1, (name, value)
        for value in refused:
            assert s.post(COMPLETIONS, {**one, name: value}, 400)["error"]["param"] == name, (name, value)


def pages(s):
    assert json.loads(s.get("/health"))["status"] == "ready" and json.loads(s.get("/ready"))["status"] == "ready"
    model = json.loads(s.get("/v1/models"))["data"][0]
    assert model["id"] == "tiny-m2" and model["max_model_len"] == 8192
    metrics = s.get("/metrics").decode()
    for line in metrics.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) minimax_\w+ .*|minimax_\w+\{model_name=\"tiny-m2\"(,\w+=\"[^\"]*\")*\} [-+\d.e]+", line), line
    values = s.metrics()
    assert values["reply_tokens_total"] >= 1 and values['http_replies_total{status="200"}'] > values['http_replies_total{status="400"}'] > 0
    # The memory of the rank's device, here the machine's, and what takes it; weights are in the page cache.
    memory = {k: values[f'device_memory_{k}_bytes{{rank="0"}}'] for k in ("total", "free_at_start")}
    used = {by: values[f'device_memory_used_bytes{{rank="0",by="{by}"}}'] for by in ("weights", "buffers", "states", "kv_cache")}
    assert memory["total"] >= memory["free_at_start"] > used["kv_cache"] == values["kv_cache_bytes"] > 0 == used["states"], (memory, used)
    assert used["weights"] == used["buffers"] == 0 and not [k for k in values if 'rank="1"' in k], used
    version = json.loads(s.get("/version"))["version"]
    assert any(k.startswith(f'build_info{{version="{version}"') and v == 1 for k, v in values.items()), values
    assert json.loads(s.get("/tokenizer_info"))["bos_token"] is None
    props = json.loads(s.get("/props"))
    assert props["total_slots"] == values["slots"] and props["default_generation_settings"]["n_ctx"] == 8192 and props["model_alias"] == "tiny-m2"


def vllm_names():
    """The names of vLLM stand next to this server's own, with the same values; a model's name is escaped."""
    with Server(PACKED, "--metric-names", "vllm", "--served-model-name", 'a "b" \\ \udcffc\u00e9') as s:
        s.post(COMPLETIONS, {**PROMPT, "max_tokens": 3})
        end = time.monotonic() + 20  # a reply may be there before its last step is counted
        while s.metrics()["step_tokens_count"] < 3 and time.monotonic() < end:
            time.sleep(0.01)
        text, values = s.get("/metrics").decode(), s.metrics()
        label = 'model_name="a \\"b\\" \\\\ \ufffdc\u00e9"'
        assert f"\nvllm:generation_tokens_total{{{label}}} 3\n" in text and values["reply_tokens_total"] == 3, text
        assert f'\nvllm:time_to_first_token_seconds_bucket{{{label},le="+Inf"}} 1\n' in text, text
        # Of one choice of three tokens: its histograms, and the step that read the prompt of three tokens and the two behind it.
        prompt = int(values["prompt_tokens_total"])
        sums = {"request_prompt_tokens": prompt, "request_generation_tokens": 3, "request_params_max_tokens": 3, "request_params_n": 1,
                "request_num_preemptions": 0, "iteration_tokens_total": prompt + 3}
        for name, value in sums.items():
            assert f"\nvllm:{name}_sum{{{label}}} {value}\n" in text, (name, value, text)
            assert f"\nvllm:{name}_count{{{label}}} {3 if name.startswith('iteration') else 1}\n" in text, (name, text)
        spent = {name: values[f"{name}_seconds_sum"] for name in ("queue", "prefill", "decode", "inference", "request")}
        assert abs(spent["prefill"] + spent["decode"] - spent["inference"]) < 1e-6 and 0 < spent["decode"] and 0 < spent["prefill"], spent
        assert 0 <= spent["queue"] and spent["queue"] + spent["inference"] <= spent["request"], spent
        for line in ('num_requests_waiting_by_reason{L,reason="capacity"} 0', 'request_success_total{L,finished_reason="length"} 1',
                     'admission_rejections_total{L,reason="queue_full"} 0', f"prefix_cache_queries_total{{L}} {prompt}"):
            assert "\nvllm:" + line.replace("L,", label + ",").replace("{L}", "{" + label + "}") + "\n" in text, line
        cache = re.search(r'\nvllm:cache_config_info\{.*block_size="(\d+)",num_gpu_blocks="(\d+)",kv_cache_size_tokens="(\d+)"', text)
        assert int(cache[1]) * int(cache[2]) == int(cache[3]) == values["kv_cache_tokens"], cache[0]
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total", "prompt_tokens_total",
                     "prefix_cache_hits_total", "e2e_request_latency_seconds_count", "inter_token_latency_seconds_sum"):
            assert f"\nvllm:{name}{{{label}}} " in text, name
        assert text.count("# TYPE vllm:time_to_first_token_seconds histogram\n") == 1


def joined(events):
    """All the text of a stream's one choice, by the names that it has, and the tokens whose logprobs were there."""
    found = {}
    for choice in (c for e in events for c in e["choices"]):
        for name, text in {k: v for k, v in choice.get("delta", choice).items() if isinstance(v, str) and k not in ("role", "finish_reason")}.items():
            found[name] = found.get(name, "") + text
        logged = choice["logprobs"] or {}
        found["logged"] = found.get("logged", []) + (logged.get("tokens") or [x["token"] for x in logged.get("content", [])])
    return found


def forms(s, how):
    """--compat: a stream's last text stands in the chunk of the finish reason, as vLLM has it, and is the same text; bodies say that they are
    JSON; an error's message has pydantic's word. And llama.cpp's refusal of two last messages of the assistant; its metrics, and none."""
    json_type, chat = {"Content-Type": "application/json; charset=utf-8"}, "/v1/chat/completions"
    ask = {"messages": [{"role": "user", "content": "In the"}], "temperature": 0}
    byte = next(i for i in range(2000) if s.post("/detokenize", {"tokens": [i, i]})["prompt"] == "\ufffd\ufffd")
    text = run(PACKED, 12)
    calls = {**ask, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "max_tokens": 60, "temperature": 3, "seed": 1}
    with Server(PACKED, *how, "--compat", "vllm", "--metric-names", "llama.cpp") as v:
        for path, body in ((COMPLETIONS, {**PROMPT, "max_tokens": 12}), (COMPLETIONS, {**PROMPT, "max_tokens": 12, "logprobs": 1}),
                           (COMPLETIONS, {**PROMPT, "max_tokens": 1, "echo": True}), (COMPLETIONS, {**PROMPT, "max_tokens": 12, "stop": ["not there", text[-1] + "~"]}),
                           (COMPLETIONS, {**PROMPT, "max_tokens": 12, "stop": "RD"}), (COMPLETIONS, {**PROMPT, "max_tokens": 3, "logit_bias": {str(byte): 100}}),
                           (chat, {**ask, "max_tokens": 9}), (chat, {**ask, "max_tokens": 9, "logprobs": True}), (chat, {**ask, "max_tokens": 9, "stop": ["zz", "yy"]}), (chat, calls)):
            here = s.events(path, body)
            status, _, data = v.request("POST", path, {**body, "stream": True}, json_type)
            there = [json.loads(x[6:]) for x in data.decode().split("\n\n")[:-2]]
            last = there[-1]["choices"][0]
            assert status == 200 and joined(here) == joined(there) and last["finish_reason"] == here[-1]["choices"][0]["finish_reason"], (body, here, there)
            assert [c["finish_reason"] for e in there for c in e["choices"]].count(None) == len(there) - 1
            before = here[-1]["choices"][0]
            assert (last["delta"] if "delta" in last else last["text"]) and not (before["delta"] if "delta" in before else before["text"].strip("\ufffd")), (body, here, there)
        many = [c for x in v.request("POST", COMPLETIONS, {**PROMPT, "max_tokens": 7, "n": 32, "stop": "zz", "stream": True}, json_type)[2].decode().split("\n\n")[:-2] for c in json.loads(x[6:])["choices"]]
        assert all(len([c for c in many if c["index"] == i]) <= 7 for i in range(32)) and all(c["text"] for c in many if c["finish_reason"]), many
        for given in ({}, {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "application/jsonl"}):
            assert v.post(COMPLETIONS, PROMPT, 400, given)["error"]["message"].startswith("Content-Type: found "), given
        assert v.post(COMPLETIONS, {**PROMPT, "seed": 2**63}, 400, json_type)["error"]["message"].endswith(" (less_than_equal)")
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a prompt that the cache has not seen, " * 5}]}
        used = [json.loads(v.request("POST", "/v1/messages", body, json_type)[2])["usage"] for _ in range(2)]
        here = s.post("/v1/messages", body)["usage"]
        total = here["input_tokens"] + here["cache_read_input_tokens"]
        for u, cached in zip(used, (None, total - 1)):
            read = u["cache_read_input_tokens"]
            assert cached in (None, read) and (u["input_tokens"], u["cache_creation_input_tokens"]) == (0, total - read), (used, total)
        status, headers, data = v.request("GET", "/metrics")
        values = dict(re.findall(r"^llamacpp:(\w+) (\S+)$", data.decode(), re.M))
        assert status == 200 and abs(int(headers["Process-Start-Time-Unix"]) - time.time()) < 600 and len(values) == data.count(b"# TYPE llamacpp:") == data.count(b"# HELP llamacpp:") == 15
        assert float(values["tokens_predicted_total"]) > 60 and 0 < float(values["n_busy_slots_per_decode"]) <= 16 and int(values["n_tokens_max"]) > 60 and float(values["predicted_tokens_seconds"]) > 0, values
    twice = {**ask, "messages": ask["messages"] + 2 * [{"role": "assistant", "content": "x"}], "max_tokens": 1}
    s.post(chat, twice)
    with Server(PACKED, *how, "--compat", "llama.cpp", "--metric-names", "none") as v:
        assert v.post(chat, twice, 400)["error"]["param"] == "messages" and v.post(chat, {**twice, "messages": twice["messages"][:2]})["choices"]
        error = v.post(COMPLETIONS, {"prompt": [1] * 9000}, 400)["error"]
        assert error["type"] == "exceed_context_size_error" and error["n_prompt_tokens"] == 9000, error
        models = json.loads(v.get("/v1/models"))
        assert models["data"][0]["status"] == {"value": "loaded"} and models["models"][0]["capabilities"] == ["completion"], models
        status, _, data = v.request("GET", "/metrics")
        assert status == 501 and json.loads(data)["error"]["type"] == "not_supported_error", data


def special():
    """A prompt's text spells control tokens where the request or the server says so, and nowhere else."""
    text = "]~b]user\nx[e~[\n"

    def tokens(s, **more):
        return s.post(COMPLETIONS, {"prompt": text, "max_tokens": 1, **more})["usage"]["prompt_tokens"]

    with Server(PACKED, "--max-model-len", "64") as s:
        plain, parsed = (s.post("/tokenize", {"prompt": text, "parse_special": x})["count"] for x in (False, True))
        assert parsed < plain and [tokens(s), tokens(s, parse_special=True), tokens(s, parse_special=False)] == [plain, parsed, plain]
        assert s.post(COMPLETIONS, {"prompt": text, "parse_special": "x"}, 400)["error"]["param"] == "parse_special"
    with Server(PACKED, "--max-model-len", "64", "--trust-user-tokens") as s:
        assert [tokens(s), tokens(s, parse_special=True), tokens(s, parse_special=False)] == [parsed, parsed, plain]


def load_reports(s):
    """The load in a header of the reply, in the form of the request's; vLLM's names. Other forms are refused by name, and other paths have none."""
    say, name = {"messages": [{"role": "user", "content": "In the beginning"}], "max_tokens": 2}, "endpoint-load-metrics"
    bodies = {COMPLETIONS: {**PROMPT, "max_tokens": 2}, "/v1/chat/completions": say, "/v1/messages": say, "/v1/responses": {"input": "In", "max_output_tokens": 2}}
    for path, body in bodies.items():
        for stream, form in itertools.product((False, True), ("TEXT", "json", None)):
            status, headers, _ = s.request("POST", path, {**body, "stream": stream}, {name + "-format": form} if form else {})
            word, _, value = (headers[name] or "").partition(" ")
            assert status == 200 and word == (form or "").upper(), (path, stream, form, headers.items())
            if form:
                pairs = json.loads(value) if form == "json" else {"named_metrics": dict(re.fullmatch(r"named_metrics\.(\w+)=([\d.]+)", x).groups() for x in value.split(", "))}
                named = pairs["named_metrics"]
                # A stream's header is sent while its own request waits.
                assert 0 <= float(named.pop("kv_cache_usage_perc")) <= 1 and float(named.pop("num_requests_waiting")) <= stream and not named, headers.items()
        for bad in ("", "BIN", "TEXT, JSON", "T", "JSON" * 2000):
            got, headers, data = s.request("POST", path, body, {name + "-format": bad})
            assert got == 400 and name + "-format" in json.loads(data)["error"]["message"] and not headers[name] and len(data) < 300, (bad, data)
    assert not s.request("POST", "/tokenize", {"prompt": "In"}, {name + "-format": "TEXT"})[1][name]


def keys():
    with Server(PACKED, "--api-key", "one", "--api-key", "two", "--served-model-name", "m", "--log-format", "json") as s:
        assert s.post(COMPLETIONS, PROMPT, 401)["error"]["code"] == "invalid_api_key"
        assert s.post(COMPLETIONS, PROMPT, 401, {"Authorization": "Bearer on"})["error"]
        assert s.post(COMPLETIONS, PROMPT, 401, {"Authorization": "Bearer oneone"})["error"]
        assert s.post(COMPLETIONS, {**PROMPT, "model": "m"}, 200, {"Authorization": "Bearer two"})["model"] == "m"
        assert s.post(COMPLETIONS, PROMPT, 200, {"x-api-key": "one"})["model"] == "m"
        assert s.request("GET", "/health")[0] == 200 and s.request("GET", "/v1/models")[0] == 401
        trace = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
        bad = [trace.upper(), trace + "0", trace[:-1], trace.replace("00-0a", "ff-0a"), "00-" + "0" * 32 + trace[35:], trace[:36] + "0" * 16 + "-01", "\"" + trace[1:]]
        for given in [trace, *bad]:
            s.post(COMPLETIONS, PROMPT, 200, {"x-api-key": "one", "traceparent": given})
        lines = [json.loads(x) for x in open(s.log)]
        mine = [x for x in lines if "path" in x and x["path"] == COMPLETIONS]
        assert [x["status"] for x in mine] == [401, 401, 401, 200, 200] + [200] * (1 + len(bad))
        assert [x.get("traceparent") for x in mine] == [None] * 5 + [trace] + [None] * len(bad)
        board = json.load(open("scripts/grafana.json"))
        named = set(re.findall(r"\bminimax_\w+", json.dumps(board["panels"] + board["templating"]["list"])))
        there = set(re.findall(r"^(\w+?)[{ ]", s.get("/metrics").decode(), re.M))
        assert len(named) > 15 and named <= there, named - there


def keys_elsewhere():
    """Keys of the environment and of a file are as good as those of the command line; what no client can send is refused, and is not shown."""
    path = os.path.join(TMP, "keys.txt")
    with open(path, "wb") as f:
        f.write(b"three\r\n\nfo-ur\n")
    os.environ["MINIMAX_API_KEY"] = "two"
    try:
        with Server(PACKED, "--api-key", "one", "--api-key-file", path, "--host", "0.0.0.0") as s:
            for key, status in (("one", 200), ("two", 200), ("three", 200), ("fo-ur", 200), ("", 401), ("five", 401), ("fo", 401)):
                s.post(COMPLETIONS, PROMPT, status, {"Authorization": f"Bearer {key}"})
            assert "anybody can use this" not in open(s.log).read()
            assert b"two" not in open(f"/proc/{s.process.pid}/cmdline", "rb").read()
    finally:
        del os.environ["MINIMAX_API_KEY"]
    for options, variable, content, status in (
            (["--api-key", ""], None, None, 2), (["--api-key", "secret key"], None, None, 2), ([], "", None, 2), ([], "secret\x7f", None, 2),
            (["--api-key-file", path], None, b"", 3), (["--api-key-file", path], None, b"\n\r\n", 3), (["--api-key-file", path], None, b"good\nsec\0ret\n", 3),
            (["--api-key-file", path], None, b"secret \n", 3), (["--api-key-file", path], None, "sécret".encode(), 3), (["--api-key-file", TMP + "/none"], None, None, 3)):
        if content is not None:
            with open(path, "wb") as f:
                f.write(content)
        env = {**os.environ, **({} if variable is None else {"MINIMAX_API_KEY": variable})}
        p = subprocess.run([f"{BIN}/minimax-serve", PACKED, "--check", *options], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert p.returncode == status and p.stderr.count("\n") == 1 and "secret" not in p.stderr and "sec\\" not in p.stderr, (options, variable, content, p)


def rest(response):
    """What still comes of a reply that may be broken off."""
    try:
        return response.read()
    except http.client.IncompleteRead as e:
        return e.partial
    except ConnectionError:
        return b""


def begin_stream(c, tokens, **more):
    """A reply of which the first bytes have come."""
    c.request("POST", COMPLETIONS, json.dumps({**PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, **more}))
    r = c.getresponse()
    r.read(10)
    return r


def ends():
    """The first signal lets what runs come to its end, the second does not."""
    with Server(PACKED) as s:
        r = begin_stream(s.connect(), 400)
        s.process.send_signal(signal.SIGTERM)
        assert r.read().endswith(b"data: [DONE]\n\n") and s.process.wait(60) == 0
    with Server(PACKED) as s:  # a client that takes its time has all of its reply
        c = s.connect()
        c.sock = socket.socket()
        c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        c.sock.settimeout(60)
        c.sock.connect(("127.0.0.1", s.port))
        r = begin_stream(c, 1000, logprobs=5)
        s.process.send_signal(signal.SIGTERM)
        s.wait_for("reply 1000")
        time.sleep(0.3)
        assert r.read().endswith(b"data: [DONE]\n\n") and s.process.wait(60) == 0
    with Server(PACKED) as s:
        r = begin_stream(s.connect(), 8000)
        s.process.send_signal(signal.SIGTERM)
        s.wait_for("draining")
        s.process.send_signal(signal.SIGTERM)
        assert s.process.wait(60) == 0 and not rest(r).endswith(b"data: [DONE]\n\n")
    for _ in range(4):  # signals until the very end
        with Server(PACKED) as s:
            while s.process.poll() is None:
                s.process.send_signal(signal.SIGTERM)
            assert s.process.returncode == 0, s.process.returncode


def command_lines():
    for status, args in [(0, [PACKED, "--check"]), (2, []), (2, [PACKED, "--max-model-len", "9000", "--check"]), (5, [PACKED, "--host", "192.0.2.1"]),
                         (3, ["/nowhere", "--check"]), (3, ["/nowhere", "--port", "0"])]:
        done = subprocess.run([f"{BIN}/minimax-serve", *args], capture_output=True, timeout=60)
        assert done.returncode == status, (args, done)


def config_file():
    """Options from a file; those of the command line win."""
    path = os.path.join(TMP, "serve.conf")
    with open(path, "w") as f:
        f.write("# a comment\nserved-model-name = named here\n\nmax-model-len 100\n  ignore-generation-config\nlog-format=json\nthreads 3\n")
    with Server(PACKED, "--config", path, "-t1", "--max-model-len", "64") as s:
        model = json.loads(s.get("/v1/models"))["data"][0]
        assert json.loads(s.get("/v1/models/named%20here"))["id"] == json.loads(s.get("/v1/models/n%61med%20her%65"))["id"] == "named here"
        for other in ("named%20her", "named%20here%20", "named%2", "named%2zhere", "named%00here"):
            assert s.request("GET", "/v1/models/" + other)[0] == 404, other
        assert (model["id"], model["max_model_len"]) == ("named here", 64) and open(s.log).read().startswith("{")
    for line in ("--port 1", "port: 1", "no-such-option", "max-queue 0", "request-timeout -1", "any-model\n\0api-key X", "config other.conf",
                 "api-key\nport 0", "served-model-name", "served-model-name=", "port abc", "act-quant maybe", "quiet true"):
        with open(path, "w") as f:
            f.write(line + "\n")
        done = subprocess.run([f"{BIN}/minimax-serve", "--config", path, PACKED, "--check"], capture_output=True, timeout=60)
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1, (line, done)
        assert line != "no-such-option" or f"{path}: line 1: unknown option \"--no-such-option\"".encode() in done.stderr, done
        assert line not in ("port abc", "act-quant maybe", "quiet true", "max-queue 0") or f"{path}: line 1: --".encode() in done.stderr, (line, done)
        assert b"operand" not in done.stderr, (line, done)  # an option without a value did not take the directory for it
    with open(path, "w") as f:
        f.write("port 9000\n\nport 9001\n")
    # What is wrong only when all options are known has its line too, unless the command line gave it.
    late = os.path.join(TMP, "late.conf")
    for text, options, word in (("# x\nread-timeout 0\n", [], "line 2: --read-timeout: found 0,"), ("gpu-memory-utilization 3", [], "line 1: --gpu-memory-utilization: found 3,"),
                                ("allow-host a\nallow-host /\n", [], "--allow-host: found /,"), ("\nprefill-min 9", [], "line 2: --prefill-min: expected"),
                                ("any-model\ndp 0", [], 'line 2: --dp: found "0"'), ("max-model-len 99999", [], "line 1: --max-model-len: found 99999,"),
                                ("any-model\napi-key =\n", [], "line 2: --api-key: found nothing,"),
                                ("kv-offload-dir /tmp", ["--kv-offload", "1G"], "line 1: --kv-offload-dir, --kv-offload-disk: expected both")):
        with open(late, "w") as f:
            f.write(text)
        for more in ([], ["--write-timeout", "9"]):
            done = subprocess.run([f"{BIN}/minimax-serve", "--config", late, PACKED, "--check", *options, *more], capture_output=True, text=True, timeout=60)
            assert done.returncode == 2 and done.stderr.startswith(f"minimax-serve: error: E_USAGE: {late}: {word}") and done.stderr.count("\n") == 1, (text, done)
    for options, word in ((["--config", path], f"{path}: line 3: --port: found twice, expected once; the first is in line 1"), (["--allow-host", "http://x"], "--allow-host: found http://x"),
                          (["--prefill-min", "5"], "--prefill-min: expected --prefill-from"), (["--prefill-timeout", "5"], "--prefill-timeout: expected")):
        done = subprocess.run([f"{BIN}/minimax-serve", *options, PACKED, "--check"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and word in done.stderr, (options, done)
    done = subprocess.run([f"{BIN}/minimax-serve", "--host", "no.such.host.invalid", "--port", "0", PACKED], capture_output=True, timeout=60)
    assert done.returncode == 5 and b"no.such.host.invalid: listen on port 0: found no such address: " in done.stderr, done
    done = subprocess.run(["sh", "-c", f"ulimit -n 6; exec {BIN}/minimax-serve {PACKED}"], capture_output=True, timeout=60)
    assert done.returncode == 5 and b"E_IO: eventfd: Too many open files; the limit is 6 descriptors (ulimit -n)\n" in done.stderr and b"[err]" not in done.stderr, done
    with Server(".", prefix=["env", "-C", PACKED]) as s:
        assert json.loads(s.get("/v1/models"))["data"][0]["id"] == "tiny-m2"


PACKED = convert("tests/data/tiny-m2")
with Server(PACKED) as server:
    completions(server, PACKED)
    stops(server, PACKED)
    sampling(server)
    errors(server)
    edges(server)
    unserved(server)
    characters(server)
    reasons(server)
    pages(server)
M2 = ("--chat-format", "minimax-m2", "--max-model-len", "512")
with Server(PACKED, *M2) as server:
    forms(server, M2)
    load_reports(server)
special()
vllm_names()
keys()
keys_elsewhere()
config_file()
ends()
command_lines()
print("completions whole, streamed and cut anywhere, fields, errors, pages, keys and signals")
