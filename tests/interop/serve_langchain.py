#!/usr/bin/env python3
"""minimax-serve through LangChain's OpenAI client: a reply whole and streamed, its usage, a tool call, a structured reply, an error. It wants
another version of openai than serve_clients.py, so it has a virtual environment of its own: VENV-langchain."""
import os
import sys

VENV = os.environ["VENV"] + "-langchain"
if sys.prefix != VENV:
    os.execv(f"{VENV}/bin/python", [f"{VENV}/bin/python", *sys.argv])
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cli"))
from serve_client import Server, convert  # noqa: E402

from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
import openai  # noqa: E402

CALL = "\n\nLooking.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Ur é</parameter>\n</invoke>\n</minimax:tool_call>"
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
PERSON = {"title": "Person", "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2]}},
          "required": ["name", "age"], "additionalProperties": False}

with Server(convert("tests/data/tiny-m2"), "--chat-format", "minimax-m2", "--served-model-name", "m", "--api-key", "k") as server:
    def client(**more):
        return ChatOpenAI(model="m", base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k", temperature=0, max_retries=0, **more)

    plain = client(max_tokens=20, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    whole = plain.invoke("In the beginning")
    assert whole.content and whole.usage_metadata["output_tokens"] <= 20, whole
    assert "".join(x.content for x in plain.stream("In the beginning")) == whole.content
    assert [x.content for x in plain.batch(["In the beginning"] * 3)] == [whole.content] * 3

    think = server.post("/tokenize", {"prompt": "</think>", "parse_special": True}, headers={"x-api-key": "k"})["tokens"][0]
    held = {"guided_choice": [CALL], "logit_bias": {str(think): 100}}
    caller = client(max_tokens=300, extra_body=held).bind_tools([TOOL])
    called = caller.invoke("weather in Ur?")
    assert [(c["name"], c["args"]) for c in called.tool_calls] == [("get_weather", {"city": "Ur é"})], called
    streamed = None
    for piece in caller.stream("weather in Ur?"):
        streamed = piece if streamed is None else streamed + piece
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("get_weather", {"city": "Ur é"})], streamed
    after = plain.bind_tools([TOOL]).invoke([HumanMessage("weather in Ur?"), called, ToolMessage("hot", tool_call_id=called.tool_calls[0]["id"])])
    assert after.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]

    person = client(max_tokens=200, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).with_structured_output(PERSON, method="json_schema")
    got = person.invoke("who?")
    assert list(got) == ["name", "age"] and len(got["name"]) <= 8 and got["age"] in (1, 2), got
    try:
        client(max_tokens=-1).invoke("x")
        raise AssertionError("max_tokens -1 was taken")
    except openai.BadRequestError as e:
        assert "max_completion_tokens" in str(e), e
print(f"LangChain over openai {openai.__version__}: replies, streams, batches, calls, structured replies, errors")
