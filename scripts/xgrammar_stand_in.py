"""Lets xgrammar be imported without torch and transformers (peers_schemas.py, peers_suite.py)."""
import importlib.util
import sys
import unittest.mock


def stand_in():
    """xgrammar imports torch and transformers for names of types alone, as far as masks go: where they are missing, empty ones stand in."""
    class Type:
        pass
    torch = importlib.util.find_spec("torch")
    if not torch:
        sys.modules["torch"] = unittest.mock.MagicMock(__spec__=None, Tensor=Type)
    for name in ("transformers", "tiktoken", "sentencepiece"):
        if not importlib.util.find_spec(name) or (name == "transformers" and not torch):  # it looks for torch, which is a stand-in
            names = dict.fromkeys(("PreTrainedTokenizerBase", "PreTrainedTokenizerFast", "LogitsProcessor"), Type)
            sys.modules[name] = unittest.mock.MagicMock(__spec__=None, **names)
