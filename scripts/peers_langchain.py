#!/usr/bin/env python3
"""LangChain's standard integration tests (ChatModelIntegrationTests) against minimax-serve with a small checkpoint, without reasoning, 500 tokens a
reply: which pass, and why the others do not. Ends with status 1 if a failure has no reason in peers_reasons.py. `--write` puts the list into
docs/peers-tests.md. Wanted next to this Python: langchain-tests 1.1.7, langchain-openai 1.2.1.
usage: peers_langchain.py BUILD DIR:CHAT-FORMAT [--write]   (DIR: a packed checkpoint)"""
import collections
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile

import peers_reasons
from peers_page import cases, replace_section

BUILD, CHECKPOINT = sys.argv[1:3]
TEST = '''
import os
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestServer(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": "m", "base_url": os.environ["URL"], "api_key": "k", "temperature": 0, "max_tokens": 500, "max_retries": 0, "timeout": 60,
                "stream_usage": True, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
'''


def run(folder, url):
    with open(f"{folder}/test_server.py", "w", encoding="utf-8") as f:
        f.write(TEST)
    # One event loop for all tests: the client keeps its connections between them.
    loops = [x for scope in ("test", "fixture") for x in ("-o", f"asyncio_default_{scope}_loop_scope=session")]
    subprocess.run([sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", *loops,
                    f"--junitxml={folder}/result.xml", "test_server.py"], cwd=folder, env={**os.environ, "URL": url}, stdout=subprocess.DEVNULL, check=False)
    return list(cases(f"{folder}/result.xml"))


def main():
    packed, chat_format = CHECKPOINT.split(":")
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/log"
        with open(log, "w", encoding="utf-8") as f:
            server = subprocess.Popen([f"{BUILD}/bin/minimax-serve", packed, "--any-model", "--chat-format", chat_format, "--port", "0"], stderr=f)
        text = ""
        while "ready after" not in text and server.poll() is None:
            with open(log, encoding="utf-8") as f:
                text = f.read()
        try:
            found = run(folder, re.search(r"listening on (http://\S+:\d+)", text).group(1) + "/v1")
        finally:
            server.terminate()
            server.wait()
    counts = collections.Counter(outcome for _, outcome, _ in found)
    rows, without = collections.defaultdict(list), []
    for test, outcome, said in found:
        if outcome == "failed":
            group, why = peers_reasons.reason("langchain", test, [said])
            rows[group, why].append(re.sub(r".*::|\[.*", "", test))
            without += [] if group else [f"{test}: {why}"]
    print(f"LangChain: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    print("".join(f"  {len(tests)} {group or 'WITHOUT A REASON'}: {why}\n" for (group, why), tests in rows.items()), end="")
    if "--write" in sys.argv:
        versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("langchain-tests", "langchain-openai", "langchain-core"))
        replace_section("LangChain", f"""## LangChain

The standard integration tests (`ChatModelIntegrationTests`; {versions}) against {os.path.basename(packed)} without reasoning, 500 tokens a reply
(`scripts/peers_langchain.py`): {counts['passed']} pass, {counts['skipped']} are skipped (pictures, sound, PDF, models by other names), {counts['failed']} fail:

| test | failures | group | |
|---|---|---|---|
""" + "".join(f"| {', '.join(dict.fromkeys(tests))} | {len(tests)} | {group} | {why} |\n" for (group, why), tests in sorted(rows.items())))
    sys.exit(bool(without))


if __name__ == "__main__":
    main()
