"""The former name of minimax_packed. A package named minimax of others, installed in the same place, is found before this file."""
import importlib
import sys

for _name in ("native", "checkpoint", "fused", "vllm"):
    sys.modules["minimax." + _name] = importlib.import_module("minimax_packed." + _name)
sys.modules[__name__] = sys.modules["minimax_packed"]
