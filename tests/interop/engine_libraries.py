"""The libraries of other engines that tests here ask: `make engines` installs them (15 GB), runs those tests and makes docs/engines.md again.
They are taken from the running Python, or from the environment that ENGINES_VENV names. With a list's name as argument, prints it."""
import importlib
import os
import sys

# transformers before 5.18 reads no rotary_dim and turns whole heads of MiniMax-M2; it asks for accelerate when it reads FP8.
NEEDS = ("torch==2.15.0", "transformers==5.24.0", "accelerate==1.15.0", "compressed-tensors==0.20.0", "ml_dtypes==0.6.0")
ALONE = ("sglang==0.5.23",)  # whose own functions are asked: without what it needs
VLLM = ("vllm==0.33.0",)  # in an environment of its own (VLLM_PYTHON), since it wants others of the above


def need(*modules):
    """Goes on where they are; goes on in that environment where they are not; or ends, saying what is missing."""
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as missing:
        other = os.environ.get("ENGINES_VENV")
        if other and os.path.realpath(sys.prefix) != os.path.realpath(other):
            python = os.path.join(other, "bin", "python")
            os.execv(python, [python, *sys.argv])
        print(f"{missing}: make engines, or name in ENGINES_VENV an environment with {' '.join(NEEDS)}")
        sys.exit(77)


if __name__ == "__main__":
    print(*globals()[sys.argv[1]])
