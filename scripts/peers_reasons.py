"""Why tests of other servers fail against minimax-serve (peers_servers.py). A refusal is found in what the server said; for the rest the tables here
say what was found by reading the test. Groups: "refused" by name; "model": the small model's prose or its tokenizer's numbers;
"not run": the test does not judge the server here."""
import re

GROUPS = {"refused": "an option, a path, a field or content that the server refuses by its name",
          "model": "the small model's prose, a limit that ends it first, or numbers of its tokenizer",
          "not run": "the test does not come to judge the server: it calls vLLM's own functions"}

# (test, what was said), both found anywhere: group, reason.
LLAMA = [
    (r"test_server_multiple_addresses", r"E_IO", "refused", "two addresses in `--host`, with the error of the address"),
    (r"test_tokenize_with_bos", r"== 1", "model", "the tokenizers of these models have no first token"),
    (r"test_chat_completion\[|test_chat_completion_cached_tokens", r"assert \d\d == \d+", "model", "numbers of prompt tokens"),
    (r"test_chat_completion_stream\[", r"match_regex", "model", "expected words"),
    (r"test_kv_keep_only_active::", r"404", "refused", "POST /completion"),
    (r"test_metrics_prometheus_format", r"0.0 > 0 .*/completion", "refused", "POST /completion"),
    (r"test_security::test_cors_options", r"401", "refused", "OPTIONS /completions, which is llama.cpp's own API"),
    (r"test_security::test_access_static_assets", r"", "refused", "GET /sw.js"),
    (r"test_vision_api::test_v?1?_?models", r"multimodal", "refused", "pictures: `capabilities` of `/models` says completion alone"),
    (r"test_completion_with_(response_format|json_schema)", r"assert False|Expected \"|AssertionError", "model", "a value does not end within 6 or 10 tokens"),
    (r"openai_library", r"assert False", "model", "expected words"),
]
VLLM = [
    (r"TestGPTOSS", r"None is not None|has no len|[Tt]imeout|timed out|No reasoning was generated", "model", "calls and answers; a reply without a limit of tokens that does not end before the client does"),
    (r"test_system_message_with_tools", r"commentary channel", "not run", "it calls vLLM's get_system_message, and no server"),
    (r"test_tokenize_chat", r"chat_template", "not run", "the released chat templates are not in CHAT_TEMPLATES"),
    (r"test_v2_endpoint", r"404", "refused", "POST /v2/embed"),
    (r"test_invocations", r"", "refused", "POST /invocations"),
    (r"test_server_load", r"404", "refused", "GET /load"),
    (r"test_decisions", r"404", "refused", "POST /v1/decisions"),
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
LANGCHAIN = [
    (r"test_structured_output", r"length limit|LengthFinishReason", "model", "strings that do not end within 500 tokens"),
    (r"test_structured_output_pydantic_2_v1", r"assert False", "model", "a required call that does not end within 500 tokens"),
    (r"tool|test_agent_loop|unicode", r"\bassert |AssertionError|length limit", "model", "it calls no tool, or one 11 times, or with other arguments, or a required call does not end"),
]
TABLES = {"llama.cpp": LLAMA, "vllm": VLLM, "langchain": LANGCHAIN}


def refusal(log, lines):
    """The option, path or field that the server named last, or None."""
    for line in reversed([*log, *lines]):
        option = re.search(r'E_USAGE: unknown option "([^"]+)"', line) or re.search(r"E_USAGE: (--[a-z-]+):", line)
        path = re.search(r"there is no ([A-Z]+ /\S*?)['\",]*(?:,|$| )", line) or re.search(r"([A-Z]+) is not for (/\S*?)['\"]*(?:,|$)", line)
        field = re.search(r"(?:Error code: 400 - | 400 \S+: |'message': ['\"])(.{3,160})", line)
        if option:
            return f"`{option.group(1)}`"
        if path:
            return re.sub(r"resp_\w+", "ID", " ".join(path.groups()))
        if field:
            return re.sub(r"\d{3,}", "N", re.split(r"['\"](?:, '|\})|$", field.group(1))[0]).rstrip("'\"}")
    return None


def reason(suite, test, said):
    """(group, reason) of a test that failed, from what each run said of it: {"lines": errors, "log": refusals of the server}."""
    for text in said:
        lines = " ".join(text["lines"][:3])
        for name, words, group, why in TABLES[suite]:
            if re.search(name, test) and re.search(words, lines + " " + " ".join(text["log"][-1:])):
                return group, why
    for text in said:
        named = refusal(text["log"], text["lines"][:1])
        if named:
            return "refused", named
    return "", said[0]["lines"][0][:150]
