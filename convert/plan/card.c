/* Writing the model card. */
#include "convert/plan/card.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/hash.h"
#include "formats/system/file.h"

#define TRANSFORMERS "transformers 5.24"
#define SGLANG       "SGLang 0.5.23"
#define NO_GLOBAL    TRANSFORMERS " leaves out the global scales of NVFP4 experts and computes wrongly: serve it with vLLM or SGLang."
#define NO_MODELOPT  TRANSFORMERS " has no reader of ModelOpt: serve it with vLLM or SGLang."

/* Which of a plan's tensors a sentence is about. */
enum {
  ALL,
  EXPERTS,
  DYNAMIC, /* experts without static scales of their inputs */
  SPARSE,  /* of a model with an index branch */
  INDEX    /* an index branch as stored where other projections are quantised, in whatever scheme */
};

/* As measured with these versions (docs/engines.md). */
static const struct {
  const char *target_format, *scheme;
  int about;
  const char *what;
} caveat[] = {
    {"ct", "nvfp4a16", EXPERTS, NO_GLOBAL},
    {"ct", "nvfp4", EXPERTS, NO_GLOBAL},
    {"ct", "mxfp4", ALL, SGLANG " reads no MXFP4 of compressed-tensors: serve it with vLLM."},
    {"ct", "mxfp8", ALL, SGLANG " reads no MXFP8 of compressed-tensors: serve it with vLLM."},
    {"ct", "mxfp8", EXPERTS, TRANSFORMERS " fails to load MXFP8 experts of compressed-tensors: serve it with vLLM."},
    {"ct", "int8", EXPERTS,
     TRANSFORMERS " fails to load INT8 experts of compressed-tensors, " SGLANG " has them on NPUs only: serve it with vLLM."},
    {"ct", "block_fp8", EXPERTS, TRANSFORMERS " fails to load block FP8 experts of compressed-tensors: --dialect fp8 is what it reads."},
    {"ct", "tensor_wise_fp8", DYNAMIC,
     "vLLM 0.33 and " SGLANG " fail on tensor-wise FP8 experts without static scales of their inputs: --act-scales gives them, "
     "channel_fp8 needs none."},
    {"ct", "w4afp8", ALL,
     "compressed-tensors 0.20 takes the words of W4A8 FP8 for plain integers when it dequantises; " TRANSFORMERS " does not."},
    {"ct", "w4afp8", ALL, SGLANG " reads W4A8 FP8 where experts have it and nothing else is quantised: serve it with vLLM otherwise."},
    {"ct", NULL, INDEX,
     "vLLM 0.33 fuses the index projections of MiniMax-M3 with q, k and v and reads one scheme for all: for vLLM give them attention's "
     "(--override \"*index_?_proj.weight=SCHEME\")."},
    {"fp8", "block_fp8", SPARSE,
     "vLLM 0.33 does not read the scales of MiniMax-M3's block FP8 under these names: --dialect ct is what it reads."},
    {"modelopt", "nvfp4a16", ALL, NO_MODELOPT},
    {"modelopt", "nvfp4", ALL, NO_MODELOPT},
    {"fp8", "tensor_wise_fp8", ALL,
     "vLLM and SGLang read tensor-wise FP8 in compressed-tensors only (--dialect ct, with --act-scales); these names are transformers'."},
};

/* A matrix of the index branch, or another one that is no expert's, is quantised or not. */
static bool has_projection(const mm_plan *p, mm_kind kind, bool quantised) {
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (p->tensor[i].rule[0] && p->tensor[i].rule[0]->kind == kind && (p->tensor[i].naming != NULL) == quantised) return true;
  return false;
}

static bool has_scheme(const mm_plan *p, const char *scheme, int about) {
  const bool index_as_stored = has_projection(p, MM_KIND_INDEX, false);
  if (about == INDEX) return index_as_stored && has_projection(p, MM_KIND_LINEAR, true);
  if (about == SPARSE && !index_as_stored && !has_projection(p, MM_KIND_INDEX, true)) return false;
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    if (strcmp(t->scheme, scheme) != 0 || ((about == EXPERTS || about == DYNAMIC) && p->tensor[i].rule[0]->kind != MM_KIND_EXPERT))
      continue;
    if (about != DYNAMIC || !(t->input_scale > 0)) return true;
  }
  return false;
}

const char *mm_card_caveat(const mm_plan *p, const char *target_format, size_t *at) {
  while (target_format && *at < sizeof caveat / sizeof *caveat) {
    const size_t i = (*at)++;
    if (strcmp(caveat[i].target_format, target_format) == 0 && has_scheme(p, caveat[i].scheme, caveat[i].about)) return caveat[i].what;
  }
  return NULL;
}

/* True if a tensor before this one has its scheme. */
static bool seen(const mm_plan *p, size_t i) {
  for (size_t j = 0; j < i; j++)
    if (strcmp(p->pack.tensor[j].scheme, p->pack.tensor[i].scheme) == 0) return true;
  return false;
}

static void put_schemes(FILE *f, const mm_plan *p, const char *target_format) {
  fputs("| scheme | matrices | weights | bits |\n|---|---|---|---|\n", f);
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_scheme *s = p->tensor[i].scheme;
    size_t count = 0;
    uint64_t weights = 0;
    if (seen(p, i)) continue;
    for (size_t j = i; j < p->pack.tensor_count; j++) {
      const mm_pack_tensor *t = &p->pack.tensor[j];
      if (p->tensor[j].scheme != s) continue;
      count += t->piece_count;
      for (unsigned k = 0; k < t->piece_count; k++) weights += (uint64_t)t->piece[k].rows * t->cols;
    }
    fprintf(f, "| `%s` | %zu | %llu | %.2f |\n", s->name, count, (unsigned long long)weights, mm_scheme_bits(s) + 1e-6);
  }
  const char *what;
  for (size_t at = 0; (what = mm_card_caveat(p, target_format, &at));) fprintf(f, "\n**Note:** %s\n", what);
}

/* "configuration_minimax_m1.MiniMaxM1Config" of auto_map is in configuration_minimax_m1.py; "org/repo--…" is in another repository. */
static bool lacks(const mm_hf *hf, const mm_json *of, char *name, size_t cap) {
  const char *text = mm_json_type_of(of) == MM_JSON_STR ? mm_json_str(of) : "";
  const size_t module = strcspn(text, ".");
  if (text[module] != '.' || module == 0 || strchr(text, '/')) return false;
  int n = snprintf(name, cap, "%.*s.py", (int)mm_min(module, 128), text);
  return n > 0 && (size_t)n < cap && access(mm_path_of(hf->dir, name).text, F_OK) != 0;
}

bool mm_card_lacks(const mm_hf *hf, char *name, size_t cap) {
  void *at = NULL;
  const char *key;
  const mm_json *map = mm_json_get(hf->config, "auto_map"), *of;
  while (mm_json_next(map, &at, &key, &of)) {
    if (lacks(hf, of, name, cap)) return true;
    for (size_t i = 0; mm_json_type_of(of) == MM_JSON_ARR && i < mm_json_size(of); i++)
      if (lacks(hf, mm_json_at(of, i), name, cap)) return true;
  }
  return false;
}

static void put_card(FILE *f, const mm_plan *p, const char *target_format) {
  const mm_pack *k = &p->pack;
  fprintf(f, "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- minimax\n---\n\n# %s%s\n\n", k->model.architecture,
          target_format ? ", quantised" : "");
  fputs("Converted by ", f);
  mm_show_to(f, k->tool);
  fputs(" from a Hugging Face checkpoint, whose licence holds for these weights too.\n\nRecipe: `", f);
  mm_show_to(f, k->quant);
  fprintf(f, "`%s%s.\n\n", target_format ? ", written in the dialect " : "", target_format ? target_format : "");
  put_schemes(f, p, target_format);
  fputs(
      "\n## Serving\n\n```\nvllm serve .\npython -m sglang.launch_server --model-path .\n```\n\nwith `--trust-remote-code` where the "
      "engine "
      "asks for it; `AutoModelForCausalLM.from_pretrained(\".\")` in transformers.\n\n## Source\n\nSHA-256 of the headers of its files, "
      "which name every tensor:\n\n",
      f);
  for (size_t i = 0; i < k->source_count; i++)
    fprintf(f, "- `%s` (%llu bytes): `%s`\n", k->source[i].name, (unsigned long long)k->source[i].size,
            mm_digest_hex(&k->source[i].sha256).text);
  fputs("\n`minimax-verify .` proves every byte by `" MM_DIGESTS "`; with `--source SRC` it measures the weights against the source.\n", f);
}

const char *mm_card_text(mm_plan *p, const char *target_format, mm_err *err) {
  char *text = NULL, *kept = NULL;
  size_t n = 0;
  FILE *f = open_memstream(&text, &n);
  if (f) put_card(f, p, target_format);
  if (f && mm_close_text(f, &text))
    kept = mm_arena_strndup(&p->pack.arena, text, n, err);
  else
    mm_fail_memory(err, n);
  free(text);
  return kept;
}
