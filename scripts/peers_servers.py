#!/usr/bin/env python3
"""The server tests of llama.cpp and of vLLM against minimax-serve: which pass, and why each of the others does not. Their files come with the
sources of two packages of PyPI: `scripts/sdist.py DIR llama-cpp-python==0.3.36 vllm==0.33.0`. llama.cpp's server is
replaced by a script that translates its options; vLLM and torch by stand-ins, its class that starts a server by one that starts ours, and tokenizers
of other models by the checkpoint's. The server has `--compat` and `--metric-names` of the suite's own; without llama.cpp's `--metrics` no metrics.
Options that minimax-serve lacks reach it from llama.cpp's tests, so that it refuses them by name. Each file of tests runs with every checkpoint; a
test passes that passes with one of them. Results stay in BUILD/peers-SUITE.json, from which the report is made again where SDIST is "-". Ends with
status 1 if a failure has no reason in peers_reasons.py. `--write` puts the list into docs/peers-tests.md.
Wanted next to this Python: pytest, pytest-asyncio, pytest-timeout, openai, anthropic, requests, httpx, regex, filelock, aiohttp, numpy,
prometheus_client, transformers; not hypothesis.
usage: peers_servers.py BUILD llama.cpp|vllm SDIST DIR:CHAT-FORMAT[,DIR:CHAT-FORMAT] [--write] [FILE…]   (DIR: a packed checkpoint)"""
import collections
import glob
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile

import peers_reasons
from peers_page import cases, replace_section

WRITE = "--write" in sys.argv
BUILD, SUITE, SDIST, CHECKPOINTS, *TESTS = [x for x in sys.argv[1:] if x != "--write"]

LLAMA_SERVER = """#!/usr/bin/env python3
import os, sys
taken = {"--port": "--port", "--host": "--host", "--alias": "--served-model-name", "--parallel": "--max-num-seqs",
         "--api-key": "--api-key", "--cors-origins": "--allow-origin", "--batch-size": "--max-num-batched-tokens"}
values = {"--temp", "--seed", "--hf-repo", "--hf-file", "--model", "--model-url", "--ubatch-size", "--threads", "--n-gpu-layers", "-ctk", "-ctv",
          "-fa", "--reasoning-format", "--reasoning", "--cache-ram", "--n-predict",
          "--ctx-size"}
# Options that a test is about; the same options of other tests say what the checkpoint of the run stands for.
kept = {"test_server_props": "--seed", "test_router_remote_preset": "--hf-repo"}
test = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1].split(" ")[0].split("[")[0]
values.discard(kept.get(test))
flags = {"--offline", "--cont-batching", "--metrics", "--kv-unified", "--swa-full", "--no-slots", "--jinja", "--no-jinja", "--verbose", "--slots",
         "--no-cache-idle-slots", "--backend_sampling"}
args, out = sys.argv[1:], ["--compat", "llama.cpp", "--metric-names", "llama.cpp" if "--metrics" in sys.argv else "none"]
if "--ctx-size" in args:  # of all slots together, unless they share one cache
    slots = int(args[args.index("--parallel") + 1]) if "--parallel" in args and "--kv-unified" not in args else 1
    out += ["--max-model-len", str(int(args[args.index("--ctx-size") + 1]) // slots)]
if {"--model", "--hf-repo", "--model-url", "--alias"}.isdisjoint(args):  # a router, which serves the models that it has by their names
    out += ["--served-model-name", "ggml-org/tinygemma3-GGUF:Q8_0"]
else:
    out.append("--any-model")
while args:
    a = args.pop(0)
    if a in taken:
        out += [taken[a], args.pop(0)]
    elif a in values:
        args.pop(0)
    elif a not in flags:
        out.append(a)
os.execv(os.environ["MINIMAX_SERVE"], ["minimax-serve", os.environ["MINIMAX_DIR"], "--chat-format", os.environ["CHAT_FORMAT"], *out])
"""

# Files that a test downloads have no content here: they reach the server as an option or as a picture, which it refuses before it reads them.
LLAMA_CONFTEST = '''
PICTURE = b"\\x89PNG\\r\\n\\x1a\\n"
requests_get = requests.get


def get(url, *a, **k):
    if not url.startswith("https://huggingface.co/"):
        return requests_get(url, *a, **k)
    response = requests.Response()
    response.status_code, response._content = 200, PICTURE
    return response


requests.get = get
os.makedirs(TMP_DIR, exist_ok=True)
'''
WGET = "def download(url, out):\n    open(out, 'wb').close()\n"

VLLM_CONFTEST = '''
import base64, importlib.abc, importlib.machinery, inspect, json, os, re, subprocess, sys, tempfile, time, types
import openai, pytest
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast  # before the stand-ins, of which it would find torch
from unittest.mock import MagicMock


def tokenizer(*_, **__):
    """The checkpoint's, whatever model a test names, with the template of its model where CHAT_TEMPLATES has it."""
    t = PreTrainedTokenizerFast(tokenizer_file=os.environ["MINIMAX_DIR"] + "/tokenizer.json")
    template = os.path.join(os.environ.get("CHAT_TEMPLATES", ""), os.environ["CHAT_FORMAT"].replace("minimax-m", "MiniMax-M") + ".jinja")
    if os.path.exists(template):
        t.chat_template = open(template, encoding="utf-8").read()
    return t


AutoTokenizer.from_pretrained = tokenizer
AutoConfig.from_pretrained = lambda *_, **__: types.SimpleNamespace(**json.load(open(os.environ["MINIMAX_DIR"] + "/config.json")))


class StandIn(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (Exception,), {}) if name.endswith("Error") else MagicMock(name=f"{self.__name__}.{name}"))
        return self.__dict__[name]


ROOTS = {"vllm", "torch", "ray", "msgspec", "zmq", "fastapi", "uvicorn", "starlette", "tblib", "cloudpickle",
         "openai_harmony", "schemathesis", "hypothesis", "mcp", "gpt_oss", "PIL", "blake3", "xgrammar", "lm_eval", "mistral_common", "partial_json_parser",
         "opentelemetry", "tensorizer", "peft", "librosa", "soundfile", "tests.models", "tests.conftest"}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ROOTS or name in ROOTS else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
import torch
torch.iinfo = lambda t: types.SimpleNamespace(min=-2**63, max=2**63 - 1)
torch.save = lambda x, f: f.write(b"embeddings")
sys.modules["pybase64"] = base64
import vllm.config, vllm.envs, vllm.multimodal.utils, vllm.tokenizers, vllm.transformers_utils.repo_utils, vllm.version
import vllm.model_executor.model_loader.weight_utils as weight_utils
# The program of the tests is this one.
vllm.version.__version__ = subprocess.run([os.environ["MINIMAX_SERVE"], "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
vllm.envs.VLLM_USE_RUST_FRONTEND = False
vllm.multimodal.utils.encode_image_url = lambda _: "data:image/png;base64,iVBORw0KGgo="
vllm.transformers_utils.repo_utils.hf_api = lambda: types.SimpleNamespace(snapshot_download=lambda **_: "adapter")
weight_utils.download_weights_from_hf = lambda name, **_: name
vllm.tokenizers.get_tokenizer = tokenizer
vllm.config.ModelConfig = lambda *_, **__: types.SimpleNamespace(get_vocab_size=lambda: len(tokenizer()))
POSITIONS = 2048  # where replies without a limit of their own end
LONG = 8192  # of tests whose texts have more tokens of a small vocabulary, or that look for the limit itself
LONG_FILES = ("anthropic/test_messages.py", "test_chunked_prompt.py", "serve/tokenize/test_tokenization.py")
PASSED_ON = {"--uds", "--enable-lora", "--enable-request-id-headers"}  # which the server refuses by name
TAKEN = {"--max-model-len", "--max-num-seqs", "--served-model-name", "--api-key", "--max-num-batched-tokens"}


running = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """What the servers refused during the test stands in its output."""
    yield
    for server in running:
        item.add_report_section("call", "stdout", server.refusals())


class Server:
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model, args, **_):
        file = os.environ["PYTEST_CURRENT_TEST"].split("::")[0]
        most = LONG if file.endswith(LONG_FILES) else POSITIONS
        own = {"--served-model-name": model, "--max-model-len": str(most)}
        for name, value in zip(args, args[1:]):
            if name in TAKEN:
                own[name] = str(most if most == LONG else min(most, int(value))) if name == "--max-model-len" else value
        self.show_hidden_metrics = any(x.startswith("--show-hidden-metrics-for-version") for x in args)
        self.log = tempfile.mktemp(dir=os.environ["TMPDIR"])
        self.proc = subprocess.Popen([os.environ["MINIMAX_SERVE"], os.environ["MINIMAX_DIR"], "--any-model", "--chat-format", os.environ["CHAT_FORMAT"], "--port",
                                      "0", "--compat", "vllm", "--metric-names", "vllm", *(x for pair in own.items() for x in pair),
                                      *(x for x in args if x in PASSED_ON)], stderr=open(self.log, "w"))
        while "ready after" not in open(self.log).read():
            if self.proc.poll() is not None:
                raise RuntimeError(open(self.log).read())
            time.sleep(0.01)
        self.shown = 0
        running.append(self)
        self.url_root = "http://127.0.0.1:" + re.search(r"listening on http://.+:(\\d+)", open(self.log).read()).group(1)
        self.port = int(self.url_root.rsplit(":", 1)[1])

    def refusals(self):
        """The lines of the log since the last call that say so."""
        text = open(self.log).read()
        found = "".join(x + "\\n" for x in text[self.shown:].splitlines() if re.search(" [45][0-9][0-9] ", x))
        self.shown = len(text)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        print(self.refusals())
        running.remove(self)
        self.proc.terminate()
        self.proc.wait()

    def url_for(self, *parts):
        return self.url_root + "/" + "/".join(p.strip("/") for p in parts)

    def get_client(self, **k):
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 60, **k})

    def get_async_client(self, **k):
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 60, **k})

    def get_async_client_anthropic(self, **k):
        import anthropic
        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **k)


utils = StandIn("tests.utils")
utils.RemoteOpenAIServer = utils.RemoteVLLMServer = utils.RemoteOpenAIServerCustom = Server
utils.create_new_process_for_each_test = utils.multi_gpu_test = lambda *a, **k: (lambda f: f)


class HfRunner:
    """Embeddings of prompts, whose bytes are none of a model's."""
    model, tokenizer, wrap_device = MagicMock(), MagicMock(), MagicMock()

    def __init__(self, _):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def get_prompt_embeddings(self, prompts):
        return [MagicMock() for _ in prompts]


@pytest.fixture(scope="session")
def hf_runner():
    return HfRunner


@pytest.fixture(scope="session")
def local_asset_server():
    return types.SimpleNamespace(url_for=lambda name: "http://127.0.0.1:9/" + name)


tests = types.ModuleType("tests")
tests.__path__ = [os.path.dirname(os.path.abspath(__file__)) + "/tests"]
sys.modules["tests"], sys.modules["tests.utils"] = tests, utils


def pytest_collection_modifyitems(config, items):
    """Tests of a server alone: the others are of vLLM's own classes."""
    keep = [i for i in items if any(re.search("server|client", n) for n in i.fixturenames) or "RemoteOpenAIServer" in inspect.getsource(i.function)]
    config.hook.pytest_deselected(items=[i for i in items if i not in keep])
    items[:] = keep
'''


def llama(root):
    place = f"{root}/{os.listdir(root)[0]}/vendor/llama.cpp/tools/server/tests"
    with open(f"{place}/utils.py", encoding="utf-8") as f:
        text = f.read().replace('make_request("GET", "/health"', 'make_request("GET", "/ready"')
    text = re.sub(r"( +)server\.offline = False\n +server\.start\(\)\n +server\.stop\(\)", r"\1pass  # no model is downloaded", text)
    with open(f"{place}/utils.py", "w", encoding="utf-8") as f:
        f.write(text)
    with open(f"{place}/conftest.py", "a", encoding="utf-8") as f:
        f.write(LLAMA_CONFTEST)
    with open(f"{place}/wget.py", "w", encoding="utf-8") as f:
        f.write(WGET)
    with open(f"{place}/unit/test_kv_keep_only_active.py", encoding="utf-8") as f:
        text = f.read()
    with open(f"{place}/unit/test_kv_keep_only_active.py", "w", encoding="utf-8") as f:
        f.write(re.sub(r"assert \"[^\"]+\" (not )?in log.drain\(\)", "pass  # a line of llama.cpp's log", text))
    with open(f"{root}/llama-server", "w", encoding="utf-8") as f:
        f.write(LLAMA_SERVER)
    os.chmod(f"{root}/llama-server", 0o755)
    os.environ["LLAMA_SERVER_BIN_PATH"] = f"{root}/llama-server"
    return place, ["-m", "not slow", "-o", "junit_logging=all"], ["unit"]


def vllm(root):
    place = f"{root}/{os.listdir(root)[0]}"
    for folder, _, names in os.walk(f"{place}/tests"):
        for name in (n for n in names if n.endswith(".py")):
            with open(f"{folder}/{name}", encoding="utf-8") as f:
                text = f.read()
            with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
                text = re.sub(r"from \.{3,}utils import", "from tests.utils import", text)
                # Parameters of vLLM's own classes, which are made when the file is read.
                f.write(text.replace("result = _make_metrics_request_output(None, tokens)", "return MagicMock()"))
    with open(f"{place}/conftest.py", "w", encoding="utf-8") as f:
        f.write(VLLM_CONFTEST)
    under = "tests/entrypoints/"
    wanted = ["openai", "serve/instrumentator", "serve/tokenize", "serve/middleware", "anthropic/test_messages.py"]
    return place, ["-o", "asyncio_mode=auto", "-o", "junit_logging=all", "--import-mode=importlib"], [under + x for x in wanted]


def measure(kept):
    """{test: {format: (outcome, what was said)}}, kept after each file of tests, which is a process of its own: one that ends takes all others along."""
    results = collections.defaultdict(dict)
    with tempfile.TemporaryDirectory() as root:
        with tarfile.open(SDIST) as tar:
            tar.extractall(root, [m for m in tar if "/tools/server/tests/" in m.name or re.match(r"[^/]+/tests/entrypoints/", m.name)])
        place, args, wanted = (llama if SUITE == "llama.cpp" else vllm)(root)
        files = sorted({f for w in TESTS or wanted for f in ([w] if w.endswith(".py") else glob.glob(f"{w}/**/test_*.py", root_dir=place, recursive=True))})
        for pair in CHECKPOINTS.split(","):
            packed, name = pair.split(":")
            os.environ.update(MINIMAX_SERVE=os.path.abspath(f"{BUILD}/bin/minimax-serve"), MINIMAX_DIR=os.path.abspath(packed), CHAT_FORMAT=name, TMPDIR=root)
            for file in files:
                with open(f"{place}/{file}", encoding="utf-8") as f:
                    if SUITE == "vllm" and not re.search(r"RemoteOpenAIServer|def test_\w+\([^)]*\b(server|client)", f.read()):
                        continue  # no test of a server
                result = f"{root}/result.xml"
                if os.path.exists(result):
                    os.remove(result)
                run = subprocess.run([sys.executable, "-m", "pytest", "-q", "--tb=short", "--timeout=90", "-p", "no:cacheprovider", f"--junitxml={result}", *args, file],
                                     cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
                if "INTERNALERROR" in run.stdout:  # of pytest, for a source line that it cannot show: without such lines
                    subprocess.run([*run.args, "--tb=native"], cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
                for test, outcome, said in cases(result):
                    results[test][name] = outcome, said
                with open(kept, "w", encoding="utf-8") as f:
                    json.dump(results, f, indent=1)
                print(f"{name} {file}", file=sys.stderr)


def judge(test, outcomes):
    """(outcome, group, reason) of a test."""
    if any(outcome == "passed" for outcome, _ in outcomes.values()):
        return "passed", "", ""
    if any(outcome == "skipped" for outcome, _ in outcomes.values()):
        return "skipped", "", ""
    group, reason = peers_reasons.reason(SUITE, test, [said for _, said in outcomes.values()])
    return "not run" if group == "not run" else "failed", group, reason


def write(judged, counts):
    """The section of the suite in the list: a row for each test function and reason, with the number of its parameters that have it."""
    rows = collections.Counter()
    for test, (outcome, group, why) in judged.items():
        if outcome in ("failed", "not run"):
            rows[re.sub(r"\[.*", "", test), group, why.replace("|", "\\|")] += 1
    section = f"""## {SUITE}

{counts['passed']} pass, {counts['skipped']} are skipped, {counts['failed']} fail, {counts['not run']} cannot run:

| test | failures | group | |
|---|---|---|---|
""" + "".join(f"| {test} | {n} | {group} | {why} |\n" for (test, group, why), n in sorted(rows.items()))
    replace_section(SUITE, section)


def main():
    kept = f"{BUILD}/peers-{SUITE}.json"
    if SDIST != "-":
        measure(kept)
    with open(kept, encoding="utf-8") as f:
        results = json.load(f)
    judged = {test: judge(test, outcomes) for test, outcomes in results.items()}
    counts = collections.Counter(outcome for outcome, _, _ in judged.values())
    print(f"{SUITE}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, {counts['not run']} not run")
    print("".join(f"  {n} {group or 'WITHOUT A REASON'}\n" for group, n in collections.Counter(g for o, g, _ in judged.values() if o == "failed").most_common()), end="")
    without = {test: why for test, (outcome, group, why) in judged.items() if outcome == "failed" and not group}
    for test, why in without.items():
        print(f"  without a reason: {test}: {why}")
    if WRITE:
        write(judged, counts)
    sys.exit(bool(without))


if __name__ == "__main__":
    main()
