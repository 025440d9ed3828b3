#!/usr/bin/env python3
"""A task of lm-evaluation-harness from its own command line's functions to a score: multiple choice by loglikelihoods, from a local file,
against /v1/completions of minimax-serve. Each loglikelihood is that of minimax-eval. `make lm-eval` installs the harness and runs it."""
import json
import os
import random
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from serve_client import BIN, TMP, Server, convert  # noqa: E402

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=os.path.join(TMP, "hub"), TOKENIZERS_PARALLELISM="false")
import lm_eval  # noqa: E402
import lm_eval.tasks  # noqa: E402

TASK = """task: held_out
dataset_path: json
dataset_kwargs:
  data_files:
    test: %s
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: "{{ends}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
QUESTIONS, CHOICES = 6, 3


def questions():
    """Where the held-out text goes on: as it does, or as it does elsewhere."""
    with open("tests/data/held-out.txt", encoding="utf-8") as f:
        words = f.read().split()
    rng = random.Random(44)
    for _ in range(QUESTIONS):
        at = rng.sample(range(len(words) - 20), CHOICES)
        ends = [" " + " ".join(words[i + 12:i + 15]) for i in at]
        label = rng.randrange(CHOICES)
        yield {"text": " ".join(words[at[label]:at[label] + 12]), "ends": ends, "label": label}


def evaluated(packed, ids):
    """The sum of log-likelihoods of ids[1:] by minimax-eval."""
    path = os.path.join(TMP, "ids.json")
    with open(path, "w", encoding="utf-8") as f:
        json.dump(ids, f)
    done = subprocess.run([f"{BIN}/minimax-eval", packed, "--ids", path, "--window", str(len(ids) - 1), "--json"], check=True, capture_output=True)
    result = json.loads(done.stdout)
    return -result.get("nll", result.get("mean_nll")) * (len(ids) - 1)


def main():
    packed, folder = convert("tests/data/tiny-m2"), os.path.join(TMP, "task")
    os.makedirs(folder)
    asked = list(questions())
    with open(f"{folder}/questions.jsonl", "w", encoding="utf-8") as f:
        f.writelines(json.dumps(q) + "\n" for q in asked)
    with open(f"{folder}/held_out.yaml", "w", encoding="utf-8") as f:
        f.write(TASK % f"{folder}/questions.jsonl")
    with Server(packed, "--served-model-name", "m") as s:
        got = lm_eval.simple_evaluate(
            model="local-completions", model_args=f"model=m,base_url=http://127.0.0.1:{s.port}/v1/completions,num_concurrent=3,max_retries=1",
            tasks=["held_out"], task_manager=lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False), bootstrap_iters=0)
        ids = lambda text: s.post("/tokenize", {"prompt": text})["tokens"]
        found = {(q["doc"]["text"], end): float(r[0]) for q in got["samples"]["held_out"] for end, r in zip(q["doc"]["ends"], q["filtered_resps"], strict=True)}
        assert len(found) == QUESTIONS * CHOICES, found
        right = 0
        for q in asked:
            wanted = [evaluated(packed, ids(q["text"] + end)) - evaluated(packed, ids(q["text"])) for end in q["ends"]]
            for end, want in zip(q["ends"], wanted, strict=True):
                value = found[q["text"], end]
                assert abs(value - want) < 1e-4 * abs(want), (q, end, value, want)
            right += wanted.index(max(wanted)) == q["label"]
    score = got["results"]["held_out"]["acc,none"]
    assert abs(score - right / QUESTIONS) < 1e-9, (score, right)
    print(f"lm-evaluation-harness {lm_eval.__version__}: {len(found)} loglikelihoods are those of minimax-eval, {right} of {QUESTIONS} right by both")


main()
