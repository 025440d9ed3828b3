/* Which scheme each tensor gets. A recipe is one line of text, kept in the manifest:
 *
 *   SCHEME [; search=absmax|mse|four_six] [; method=nearest|gptq] [; kv_scales=keep|f32|drop] [; PATTERN=SCHEME]…
 *     [; importance=DIGEST] [; act_scales=DIGEST] [; nonfinite=zero]
 *
 * The first SCHEME ("none" keeps what is stored) goes to attention and expert projections; norms, routers and biases are never
 * quantised, embedding and head only where a pattern names them. A PATTERN (pattern.h) is a glob, or a Perl-compatible regular expression
 * behind "re:", held against the packed name and the Hugging Face names it is made of; the last one that matches wins. The digests
 * are those of the files that weighed searches and gave static scales of activations; nonfinite=zero says that weights which are NaN or
 * infinite are stored as 0. minimax-convert puts all three there. */
#ifndef MM_CONVERT_RECIPE_H
#define MM_CONVERT_RECIPE_H

#include "convert/model/pattern.h"
#include "convert/model/rule.h"
#include "quant/quant.h"

#define MM_RECIPE_BYTES    (UINT64_C(64) << 10) /* of the line, and of a recipe file */
#define MM_RECIPE_PATTERNS 1024

typedef struct mm_override {
  const char *text; /* of the pattern */
  mm_pattern pattern;
  bool hit;                /* it matched a name */
  const mm_scheme *scheme; /* NULL: none */
} mm_override;

/* How codes are found under their scales: each weight's nearest, or with error feedback (quant/feedback.h). */
typedef enum mm_method { MM_METHOD_NEAREST, MM_METHOD_GPTQ } mm_method;

typedef enum mm_kv_scales { MM_KV_KEEP, MM_KV_F32, MM_KV_DROP } mm_kv_scales;

typedef struct mm_recipe {
  const mm_scheme *scheme;             /* NULL: none */
  const char *importance, *act_scales; /* SHA-256 in hexadecimal, or NULL */
  bool nonfinite_zero;
  mm_kv_scales kv_scales;
  mm_method method; /* of the schemes with scales */
  mm_search search; /* for the schemes that have it; the others choose by absmax */
  size_t count;
  mm_override *override;
  mm_arena arena;
} mm_recipe;

/* Texts of --ignore, or with `rules` of --override, which become rules of such a line: none holds ";" or has a field's name as its pattern;
 * MM_USAGE E_RECIPE. */
MM_MUST_USE bool mm_recipe_options_ok(const char *option, const char *const *text, size_t count, bool rules, mm_err *err);
/* Parses the line above; MM_USAGE E_RECIPE names what is wrong. */
MM_MUST_USE bool mm_recipe_parse(mm_recipe *r, const char *text, mm_err *err);
/* Reads {"default": SCHEME, "search": …, "method": …, "kv_scales": …, "rules": [{"match": PATTERN, "scheme": SCHEME}, …]} into the same
 * line (in *a). */
char *mm_recipe_load(mm_arena *a, const char *path, mm_err *err);
/* The line (in *a) that all lines of one meaning have, as their plans' digests hold it: its fields in order, defaults left out, schemes by
 * their names. */
char *mm_recipe_line(mm_arena *a, const char *text, mm_err *err);
/* mm_recipe_parse of such a line, which may be longer than the one that was given, and so than MM_RECIPE_BYTES. */
MM_MUST_USE bool mm_recipe_parse_normal(mm_recipe *r, const char *text, mm_err *err);
/* The recipe in that form; what the options of a run put there (digests, nonfinite) is left out. free() it. */
char *mm_recipe_text(const mm_recipe *r, mm_err *err);
/* The recipe and the name of its target format in 64 bits, from which it can be said in what another one differs. */
uint64_t mm_recipe_code(const mm_recipe *r, const char *target_format);
/* False: the codes, which may be anything, are equal. found and own: the options of either that differ; own is "the same" where the code
 * has no more than a check of them. */
bool mm_recipe_code_differ(uint64_t found_code, uint64_t own_code, char found[160], char own[160]);
/* A name for a recipe line. */
typedef struct mm_preset {
  const char *name, *line, *purpose;
} mm_preset;
const mm_preset *mm_preset_at(size_t i); /* NULL past the end */
/* The line of a named preset ("experts_nvfp4", …), or NULL. */
const char *mm_recipe_preset(const char *name);
/* Writes every word that --quant takes as it is into text[n]: none, schemes, presets, separated by `|`. */
MM_MUST_USE bool mm_recipe_words(char *text, size_t n, mm_err *err);
/* The same as a table: name, bits, SQNR, purpose, and the synonyms of schemes. */
void mm_recipe_help(FILE *f);
/* The same: {"schemes": [{"name", "bits", "sqnr_db", "purpose", "synonyms"}], "presets": [{"name", "purpose", "recipe"}]}, without bits and
 * sqnr_db where there are none. free() it. */
char *mm_recipe_help_json(mm_err *err);
void mm_recipe_close(mm_recipe *r);

/* The scheme for a tensor of this kind and these names (NULL-terminated list); *keep is set instead where it is stored as it comes.
 * A pattern that would quantise a norm, router or bias is MM_USAGE E_RECIPE. */
MM_MUST_USE bool mm_recipe_choose(mm_recipe *r, mm_kind kind, const char *const *names, const mm_scheme **scheme, mm_err *err);
/* The same for a stack of experts, with at most 8 names; each {e} in them stands for every expert's id. MM_USAGE E_RECIPE where patterns
 * give some experts another scheme than others. */
MM_MUST_USE bool mm_recipe_choose_stack(mm_recipe *r, const char *const *names, uint32_t experts, const mm_scheme **scheme, mm_err *err);
/* After all tensors: MM_USAGE E_RECIPE names the first pattern that matched none of them. */
MM_MUST_USE bool mm_recipe_all_hit(const mm_recipe *r, mm_err *err);
/* How `scheme` chooses scales under this recipe. */
mm_search mm_recipe_search(const mm_recipe *r, const mm_scheme *scheme);

#endif
