"""Why tests of other servers fail against minimax-serve (peers_servers.py). A refusal is found in what the server said; for the rest the tables here
say what was found by reading the test. Groups: "refused" by name; "model": the small model's prose or its tokenizer's numbers;
"lacking": models and packages of the run."""
import re

GROUPS = {"refused": "an option, a path, a field or content that the server refuses by its name",
          "model": "the small model's prose, a limit that ends it first, or numbers of its tokenizer",
          "lacking": "models, pictures and packages that the run does not have, and tests of vLLM's or llama.cpp's own insides"}

# (test, what was said), both found anywhere: group, reason.
LLAMA = [
    (r"test_server_multiple_addresses", r"E_IO", "refused", "two addresses in `--host`, with the error of the address"),
    (r"test_server_props", r"model_path", "lacking", "a path that ends in .gguf"),
    (r"test_tokenize_with_bos", r"== 1", "model", "the tokenizers of these models have no first token"),
    (r"test_chat_completion\[|test_chat_completion_cached_tokens", r"assert \d\d == \d+", "model", "numbers of prompt tokens"),
    (r"test_chat_completion_stream\[", r"match_regex", "model", "expected words"),
    (r"test_kv_keep_only_active::test_disabled", r"404", "refused", "POST /completion"),
    (r"test_metrics_prometheus_format", r"0.0 > 0 .*/completion", "refused", "POST /completion"),
    (r"test_security::test_cors_options", r"401", "refused", "OPTIONS /completions, which is llama.cpp's own API"),
    (r"test_security::test_access_static_assets", r"", "refused", "GET /sw.js"),
    (r"test_kv_keep_only_active::test_clear", r"", "lacking", "a line of llama.cpp's log"),
    (r"test_vision_api::test_v?1?_?models", r"'models'", "refused", "pictures: no model has the capability"),
    (r"test_router::test_router_remote_preset|test_router::test_router_chat_completion_stream", r"", "lacking", "several models"),
    (r"test_router::.*(reload|dedup)", r"FileNotFound", "lacking", "models in files"),
    (r"test_stream::", r"StopIteration", "lacking", "several models, loaded by requests"),
    (r"", r"'wget'|gaierror|huggingface", "lacking", "files to download"),
    (r"test_completion_with_(response_format|json_schema)", r"assert False|Expected \"|AssertionError", "model", "a value does not end within 6 or 10 tokens"),
    (r"openai_library", r"assert False", "model", "expected words"),
]
VLLM = [
    (r"test_v2_endpoint", r"404", "refused", "POST /v2/embed"),
    (r"show_hidden|test_metrics_counts", r"show_hidden_metrics", "lacking", "an attribute of vLLM's class of servers"),
    (r"test_tokenize_completions", r"2048 == 8192", "lacking", "a context of more than 2,048 tokens"),
    (r"test_tokenize_chat", r"chat_template", "lacking", "a chat template beside the tokenizer of the run"),
    (r"test_tokenize_with_return_token_strs", r"400", "refused", "return_token_strs: not served here"),
    (r"", r"prompt is too long", "lacking", "a context of more than 2,048 tokens"),
    (r"test_invocations", r"", "refused", "POST /invocations"),
    (r"test_server_load", r"404", "refused", "GET /load"),
    (r"test_decisions", r"404", "refused", "POST /v1/decisions"),
    (r"test_(enable|custom)_request_id_header", r"", "refused", "`--enable-request-id-headers`: replies of the APIs alone have X-Request-Id"),
    (r"orca", r"", "refused", "the header endpoint-load-metrics-format; /metrics has the values"),
    (r"test_show_version", r"", "lacking", "vLLM's own version"),
    (r"", r"gpt_oss package|huggingface_hub|hf_runner|local_asset_server|openai_harmony", "lacking", "gpt-oss, or embeddings and pictures of other models"),
    (r"", r"Magic|IndexError: list index|stand-in", "lacking", "vLLM's own classes, or adapters (LoRA)"),
    (r"test_return_token_ids", r"prompt_token_ids", "refused", "return_token_ids: token ids are not in the reply; /tokenize gives them"),
    (r"test_background_error", r"", "refused", "background: nothing is stored here; send the whole input"),
    (r"test_single_chat_session|test_single_completion", r"assert (CompletionUsa|\d+ == \d+)", "model", "numbers of prompt tokens"),
    (r"", r"'length' == 'stop'|'max_tokens' == |'incomplete' == 'completed'|response.incomplete|Unclosed events|Unterminated string|ValidationError|JSONDecodeError", "model",
     "the limit of tokens ends the reply first"),
    (r"test_basic::|test_complex_message|translategemma|test_structured_outputs_choice|test_response_format|function_call|tool_use", r"assert|AssertionError", "model",
     "the answer to a question, calls and their arguments"),
    (r"test_include_reasoning|test_reasoning|streaming_reasoning", r"reasoning|None is not None", "model", "M1 does not reason of itself; M2's reasoning has not ended at the limit"),
    (r"test_abort_metrics_reset", r"Timed out", "model", "a reply ends before the metrics are read"),
]


def refusal(log, lines):
    """The option, path or field that the server named last, or None."""
    for line in reversed([*log, *lines]):
        option = re.search(r'E_USAGE: unknown option "([^"]+)"', line) or re.search(r"E_USAGE: (--[a-z-]+):", line)
        path = re.search(r"there is no ([A-Z]+ /\S*?)['\",]*(?:,|$| )", line) or re.search(r"([A-Z]+) is not for (/\S*?)['\"]*(?:,|$)", line)
        field = re.search(r"(?:Error code: 400 - | 400 \S+: |'message': ['\"])(.{3,160})", line)
        if option:
            return f"`{option.group(1)}`"
        if path:
            return " ".join(path.groups())
        if field:
            return re.sub(r"\d{3,}", "N", re.split(r"['\"], '|$", field.group(1))[0]).rstrip("'\"}")
    return None


def reason(suite, test, said):
    """(group, reason) of a test that failed, from what each run said of it: {"lines": errors, "log": refusals of the server}."""
    for text in said:
        lines = " ".join(text["lines"][:3])
        for name, words, group, why in LLAMA if suite == "llama.cpp" else VLLM:
            if re.search(name, test) and re.search(words, lines + " " + " ".join(text["log"][-1:])):
                return group, why
    for text in said:
        named = refusal(text["log"], text["lines"][:1])
        if named:
            return "refused", named
    return "", said[0]["lines"][0][:150]
