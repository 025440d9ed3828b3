/* Options that a program does not have: those of other engines are answered by name, others by the nearest name. */
#include <string.h>

#include "formats/commands.h"
#include "formats/option_text.h"

/* An option of vLLM, SGLang or llama.cpp. */
typedef struct foreign {
  const char *name;
  const char *own;    /* the option here that does the same, in the programs that have it; or NULL */
  const char *answer; /* elsewhere */
} foreign;

#define CUT(what, option) what ", when it is converted: minimax-convert SRC -o DIR --" option " N"
#define OPERAND           "the checkpoint's directory is an operand, without an option"
#define SERVED            "it is an option of minimax-serve"
#define BUILT_IN          "not needed: the checkpoint's chat format has calls and reasoning (minimax-serve --chat-format names another)"

static const foreign table[] = {
    {"tensor-parallel-size", "tp", CUT("a checkpoint is cut into its ranks", "tp")},
    {"tp-size", "tp", CUT("a checkpoint is cut into its ranks", "tp")},
    {"tp", "tp", CUT("a checkpoint is cut into its ranks", "tp")},
    {"pipeline-parallel-size", "pp", CUT("a checkpoint is cut into its stages", "pp")},
    {"pp-size", "pp", CUT("a checkpoint is cut into its stages", "pp")},
    {"enable-expert-parallel", "ep", CUT("experts are divided among ranks", "ep")},
    {"expert-parallel-size", "ep", CUT("experts are divided among ranks", "ep")},
    {"ep-size", "ep", CUT("experts are divided among ranks", "ep")},
    {"enable-dp-attention", "attn-tp", CUT("attention is cut for groups of ranks", "attn-tp")},
    {"dp-size", "dp", CUT("attention is cut for groups of ranks", "attn-tp")},
    {"data-parallel-size", NULL, "run a server for each replica, behind a proxy"},
    {"model", NULL, OPERAND},
    {"model-path", NULL, OPERAND},
    {"tokenizer", NULL, "the tokenizer is the checkpoint's own"},
    {"dtype", NULL, "weights have the types that minimax-convert --quant gave them; the KV cache has --kv-cache-dtype"},
    {"quantization", "quant", "weights are quantised when they are converted: minimax-convert SRC -o DIR --quant SCHEME"},
    {"load-format", NULL, "not needed: a packed checkpoint is known by its manifest"},
    {"trust-remote-code", NULL, "not needed: no code of a checkpoint is run"},
    {"enforce-eager", NULL, "not needed: CUDA graphs are captured at their first use"},
    {"download-dir", NULL, "hf download fetches a source; HF_HOME says where it lies"},
    {"max-num-seqs", NULL, SERVED},
    {"max-running-requests", "max-num-seqs", SERVED ", by the name --max-num-seqs"},
    {"max-num-batched-tokens", NULL, SERVED},
    {"chunked-prefill-size", "max-num-batched-tokens", SERVED ", by the name --max-num-batched-tokens"},
    {"enable-chunked-prefill", NULL, "not needed: prompts are always cut; minimax-serve --max-num-batched-tokens says how finely"},
    {"served-model-name", NULL, SERVED},
    {"max-model-len", NULL, SERVED " and minimax-run; minimax-convert --gpu-memory says what fits"},
    {"context-length", "max-model-len", SERVED ", by the name --max-model-len"},
    {"ctx-size", "max-model-len", SERVED ", by the name --max-model-len"},
    {"gpu-memory-utilization", NULL, SERVED "; minimax-convert --gpu-memory says what fits"},
    {"mem-fraction-static", "gpu-memory-utilization", SERVED ", by the name --gpu-memory-utilization"},
    {"enable-prefix-caching", "prefix-cache", "not needed: prompts are cached (minimax-serve --prefix-cache off: they are not)"},
    {"no-enable-prefix-caching", "prefix-cache", SERVED ", by the name --prefix-cache off"},
    {"enable-auto-tool-choice", NULL, BUILT_IN},
    {"tool-call-parser", NULL, BUILT_IN},
    {"reasoning-parser", NULL, BUILT_IN},
    {"chat-template", "chat-format", SERVED ", by the name --chat-format"},
    {"speculative-config", "drafts", SERVED ", by the name --drafts"},
    {"cpu-offload-gb", NULL, "weights stay on the GPUs; nothing is offloaded"},
    {"swap-space", "kv-offload", SERVED ", by the name --kv-offload"},
    {"kv-offloading-size", "kv-offload", SERVED ", by the name --kv-offload"},
    {"hicache-size", "kv-offload", SERVED ", by the name --kv-offload"},
    {"kv-transfer-config", "prefill-from", SERVED ", by the names --kv-listen and --prefill-from"},
    {"disaggregation-mode", "prefill-from", SERVED ", by the names --kv-listen and --prefill-from"},
    {"metrics", "metric-names", SERVED ", by the name --metric-names llama.cpp"},
    {"n-gpu-layers", "device", "--device cuda computes every layer on GPUs"},
};

static bool has(const mm_program *p, const char *name) {
  const mm_option *o;
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++)
    if (strcmp(o->name, name) == 0) return true;
  return false;
}

static bool begins(const char *name, const char *word, size_t n) { return n > 2 && strncmp(name, word, n) == 0; }

/* The name that word[0, n) begins, or the one with the fewest edits; NULL where none is near. */
static const char *nearest(const mm_program *p, const char *word, size_t n) {
  const mm_option *o;
  const char *found = NULL;
  unsigned few = 0;
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++) {
    const char *const name[] = {o->name, o->alias};
    for (size_t j = 0; j < 2 && name[j]; j++) {
      const unsigned edits = begins(name[j], word, n) ? 0 : mm_edits(word, n, name[j], strlen(name[j]));
      if ((!edits || mm_edits_few(edits, n)) && (!found || edits < few)) found = name[j], few = edits;
    }
  }
  return found;
}

bool mm_option_unknown(const mm_program *p, const char *word, mm_err *err) {
  char answer[256] = "; ";
  const char *name = word[1] == '-' ? word + 2 : "";
  const size_t n = strcspn(name, "="), capacity = sizeof answer - 2;
  const foreign *f = NULL;
  for (size_t i = 0; !f && i < sizeof table / sizeof *table; i++)
    if (strlen(table[i].name) == n && memcmp(table[i].name, name, n) == 0) f = &table[i];
  const char *near = f ? NULL : nearest(p, name, n);
  if (f && f->own && has(p, f->own))
    snprintf(answer + 2, capacity, "here it is --%s", f->own);
  else if (f)
    snprintf(answer + 2, capacity, "%s", f->answer);
  else if (near)
    snprintf(answer + 2, capacity, "did you mean --%s? See %s --help", near, p->name);
  else
    snprintf(answer + 2, capacity, "see %s --help", p->name);
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "unknown option \"%s\"%s", MM_ESCAPED(256, word), answer);
}
