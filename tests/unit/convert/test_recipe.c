/* convert/recipe: what a line gives to which tensor, what is refused, and the three forms of a recipe (line, preset, file) against each
 * other. */
#include "convert/model/recipe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/unit.h"

#define DIGEST "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

static mm_recipe parsed(const char *line) {
  mm_recipe r;
  mm_err err = {0};
  if (!mm_recipe_parse(&r, line, &err)) fail_msg("%s: %s", line, err.text);
  return r;
}

static void refused(const char *line, const char *says) {
  mm_recipe r;
  mm_err err = {0};
  if (mm_recipe_parse(&r, line, &err)) fail_msg("%s was taken", line);
  assert_int_equal(err.status, MM_USAGE);
  assert_string_equal(err.code, "E_RECIPE");
  if (!strstr(err.text, says)) fail_msg("%s: %s", line, err.text);
  mm_recipe_close(&r);
}

/* The word of the scheme that a tensor of these names gets; "none" where it is kept. */
static const char *chosen(mm_recipe *r, mm_kind kind, const char *ours, const char *theirs) {
  const char *const names[] = {ours, theirs, NULL};
  const mm_scheme *s;
  mm_err err = {0};
  if (!mm_recipe_choose(r, kind, names, &s, &err)) fail_msg("%s", err.text);
  return s ? s->name : "none";
}

TEST(test_fields) {
  mm_recipe r = parsed("  nvfp4\t; search = four_six;kv_scales=f32; *a=b*=int8 ;re:x{2}=none; importance=" DIGEST "; nonfinite=zero");
  assert_string_equal(r.scheme->name, "nvfp4");
  assert_int_equal(r.search, MM_SEARCH_FOUR_SIX);
  assert_int_equal(r.kv_scales, MM_KV_F32);
  assert_int_equal(r.count, 2);
  assert_string_equal(r.override[0].text, "*a=b*"); /* the last "=" divides */
  assert_string_equal(r.override[0].scheme->name, "int8");
  assert_string_equal(r.override[1].text, "re:x{2}");
  assert_null(r.override[1].scheme);
  assert_string_equal(r.importance, DIGEST);
  assert_null(r.act_scales);
  assert_true(r.nonfinite_zero);
  mm_recipe_close(&r);
  r = parsed("none");
  assert_null(r.scheme);
  assert_int_equal(r.search, MM_SEARCH_MSE);
  assert_int_equal(r.kv_scales, MM_KV_KEEP);
  assert_int_equal(r.count, 0);
  assert_false(r.nonfinite_zero);
  mm_recipe_close(&r);
  r = parsed("bf16; act_scales=" DIGEST "; search=absmax; kv_scales=drop");
  assert_string_equal(r.act_scales, DIGEST);
  assert_int_equal(r.search, MM_SEARCH_ABSMAX);
  assert_int_equal(r.kv_scales, MM_KV_DROP);
  mm_recipe_close(&r);
}

TEST(test_refused) {
  static const char *const row[][2] = {
      {"", "an empty recipe"},
      {"zzz", "unknown scheme \"zzz\""},
      {"FP8", "may mean several schemes"},
      {"none; *x*", "no \"=\" in"},
      {"none; =int8", "an empty pattern"},
      {"none; *x*=zzz", "unknown scheme \"zzz\""},
      {"none; *x*=experts_int4", "preset \"experts_int4\""},
      {"experts_int4; lm_head*=int8", "what it stands for: none; *.experts.*=w4a16"},
      {"none; search=best", "unknown search \"best\""},
      {"none; kv_scales=lose", "unknown use of KV scales"},
      {"none; nonfinite=one", "unknown use of weights that are not finite"},
      {"none; importance=12", "no digest, or a second one"},
      {"none; importance=" DIGEST "; importance=" DIGEST, "no digest, or a second one"},
      {"none; act_scales=" DIGEST "; act_scales=" DIGEST, "no digest, or a second one"},
      {"none; re:((a=int8", "re:((a"},
  };
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) refused(row[i][0], row[i][1]);
  char *line = malloc(MM_RECIPE_BYTES + 2);
  assert_non_null(line);
  memset(line, ' ', MM_RECIPE_BYTES + 1);
  memcpy(line, "int8", 4);
  line[MM_RECIPE_BYTES + 1] = 0;
  refused(line, "expected at most 65536");
  line[MM_RECIPE_BYTES] = 0; /* exactly so many are taken */
  mm_recipe r = parsed(line);
  assert_string_equal(r.scheme->name, "int8");
  mm_recipe_close(&r);
  size_t n = (size_t)sprintf(line, "none");
  for (int i = 0; i < MM_RECIPE_PATTERNS; i++) n += (size_t)sprintf(line + n, ";%d=int8", i);
  r = parsed(line);
  assert_int_equal(r.count, MM_RECIPE_PATTERNS);
  mm_recipe_close(&r);
  sprintf(line + n, ";x=int8");
  refused(line, "found more patterns, expected at most 1024");
  free(line);
}

/* A line that is taken has a plan, also where the plan's is longer: a blank behind each ";", whole names of schemes. */
TEST(test_long_line) {
  mm_err err = {0};
  mm_arena arena = {0};
  mm_recipe r;
  char *line = malloc(MM_RECIPE_BYTES + 1);
  assert_non_null(line);
  size_t n = (size_t)sprintf(line, "none");
  for (int i = 0; i < MM_RECIPE_PATTERNS; i++) n += (size_t)sprintf(line + n, ";%057d=int4", i);
  assert_true(n <= MM_RECIPE_BYTES);
  const char *normal = mm_recipe_line(&arena, line, &err);
  assert_non_null(normal);
  assert_true(strlen(normal) > MM_RECIPE_BYTES);
  if (!mm_recipe_parse_normal(&r, normal, &err)) fail_msg("%s", err.text);
  assert_int_equal(r.count, MM_RECIPE_PATTERNS);
  assert_string_equal(mm_recipe_line(&arena, line, &err), normal);
  mm_recipe_close(&r);
  mm_arena_close(&arena);
  free(line);
}

TEST(test_choose) {
  mm_err err = {0};
  mm_recipe r = parsed("block_fp8; *w1*=int8; *experts*=w4a16; ours.head=bf16; never=int8");
  assert_string_equal(chosen(&r, MM_KIND_LINEAR, "q_proj", "theirs"), "block_fp8");
  assert_string_equal(chosen(&r, MM_KIND_EXPERT, "x", "y"), "block_fp8");
  assert_string_equal(chosen(&r, MM_KIND_EMBED, "embed", "embed"), "none");
  assert_string_equal(chosen(&r, MM_KIND_PASS_THROUGH, "norm", "norm"), "none");
  assert_string_equal(chosen(&r, MM_KIND_KV_SCALE, "k_scale", "k_scale"), "none");
  assert_string_equal(chosen(&r, MM_KIND_EXPERT, "x", "experts.3.w1"), "w4a16"); /* the last that matches */
  assert_true(r.override[0].hit && r.override[1].hit && !r.override[2].hit);
  assert_string_equal(chosen(&r, MM_KIND_LINEAR, "w1", "x"), "int8");
  assert_string_equal(chosen(&r, MM_KIND_EMBED, "ours.head", "x"), "bf16");
  assert_false(mm_recipe_all_hit(&r, &err));
  assert_non_null(strstr(err.text, "found pattern \"never\", which matches no tensor"));
  assert_string_equal(chosen(&r, MM_KIND_LINEAR, "never", "x"), "int8");
  err = (mm_err){0};
  assert_true(mm_recipe_all_hit(&r, &err));
  const char *const norm[] = {"experts.norm", NULL};
  const mm_scheme *s;
  assert_false(mm_recipe_choose(&r, MM_KIND_PASS_THROUGH, norm, &s, &err));
  assert_string_equal(err.code, "E_RECIPE");
  err = (mm_err){0};
  assert_false(mm_recipe_choose(&r, MM_KIND_KV_SCALE, norm, &s, &err));
  mm_recipe_close(&r);
  r = parsed("none; kv_scales=f32; *norm*=none");
  assert_string_equal(chosen(&r, MM_KIND_KV_SCALE, "k_scale", "x"), mm_scheme_plain(MM_F32)->name);
  assert_string_equal(chosen(&r, MM_KIND_PASS_THROUGH, "norm", "x"), "none"); /* to keep it is no harm */
  assert_string_equal(chosen(&r, MM_KIND_LINEAR, "q", "x"), "none");
  mm_recipe_close(&r);
}

TEST(test_search) {
  mm_recipe r = parsed("none; search=four_six");
  assert_int_equal(mm_recipe_search(&r, mm_scheme_find("nvfp4")), MM_SEARCH_FOUR_SIX);
  assert_int_equal(mm_recipe_search(&r, mm_scheme_find("bf16")), MM_SEARCH_ABSMAX);
  assert_int_equal(mm_recipe_search(&r, mm_scheme_find("w4a16")), MM_SEARCH_ABSMAX);
  mm_recipe_close(&r);
  r = parsed("none");
  assert_int_equal(mm_recipe_search(&r, mm_scheme_find("w4a16")), MM_SEARCH_MSE);
  mm_recipe_close(&r);
}

/* A line, printed as a file's text and read again, is the same recipe. */
TEST(test_file) {
  static const char *const line[] = {"nvfp4; search=four_six; kv_scales=drop; *w1*=int8; re:a|b=none; *q\"uote*=bf16", "none",
                                     "block_fp8; search=absmax"};
  char path[] = "/tmp/mm-recipe-XXXXXX";
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  close(fd);
  for (size_t i = 0; i < sizeof line / sizeof *line; i++) {
    mm_err err = {0};
    mm_arena arena = {0};
    mm_recipe a = parsed(line[i]);
    char *text = mm_recipe_text(&a, &err);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_non_null(text);
    fputs(text, f);
    fclose(f);
    char *again = mm_recipe_load(&arena, path, &err);
    if (!again) fail_msg("%s", err.text);
    mm_recipe b = parsed(again);
    assert_ptr_equal(a.scheme, b.scheme);
    assert_int_equal(a.search, b.search);
    assert_int_equal(a.kv_scales, b.kv_scales);
    assert_int_equal(a.count, b.count);
    for (size_t j = 0; j < a.count; j++) {
      assert_string_equal(a.override[j].text, b.override[j].text);
      assert_ptr_equal(a.override[j].scheme, b.override[j].scheme);
    }
    free(text);
    mm_recipe_close(&a);
    mm_recipe_close(&b);
    mm_arena_close(&arena);
  }
  static const char *const wrong[] = {"{}", "{\"default\":\"none\",\"rule\":[]}", "{\"default\":1}", "{\"default\":\"none\",\"rules\":{}}",
                                      "{\"default\":\"none\",\"rules\":[{\"match\":\"x\"}]}", "{\"default\":\"none\",\"search\":2}",
                                      /* what would be another recipe as a line */
                                      "{\"default\":\"none; *=bf16\"}", "{\"default\":\"none\",\"search\":\"mse; *=bf16\"}",
                                      "{\"default\":\"none\",\"kv_scales\":\"drop; *=bf16\"}",
                                      "{\"default\":\"none\",\"rules\":[{\"match\":\"a=bf16; b\",\"scheme\":\"none\"}]}",
                                      "{\"default\":\"none\",\"rules\":[{\"match\":\"a\",\"scheme\":\"b=none\"}]}",
                                      "{\"default\":\"none\",\"rules\":[{\"match\":\"a\",\"scheme\":\"none; b=bf16\"}]}",
                                      "{\"default\":\"none\",\"rules\":[{\"match\":\" a\",\"scheme\":\"none\"}]}",
                                      "{\"default\":\"none\",\"rules\":[{\"match\":\"nonfinite\",\"scheme\":\"none\"}]}"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    mm_err err = {0};
    mm_arena arena = {0};
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(wrong[i], f);
    fclose(f);
    assert_null(mm_recipe_load(&arena, path, &err));
    assert_int_equal(err.status, MM_BAD_INPUT);
    mm_arena_close(&arena);
  }
  unlink(path);
}

TEST(test_words) {
  mm_err err = {0};
  char words[1024], few[24];
  assert_true(mm_recipe_words(words, sizeof words, &err));
  assert_false(mm_recipe_words(few, sizeof few, &err));
  size_t count = 0;
  for (char *save, *word = strtok_r(words, "|", &save); word; word = strtok_r(NULL, "|", &save), count++) {
    const char *line = mm_recipe_preset(word);
    mm_recipe r = parsed(line ? line : word);
    mm_recipe_close(&r);
  }
  size_t schemes = 0, presets = 0;
  while (mm_scheme_at(schemes)) schemes++;
  while (mm_preset_at(presets)) presets++;
  assert_int_equal(count, 1 + schemes + presets);
  assert_true(presets >= 5);
  assert_null(mm_recipe_preset("none"));
  mm_recipe r = parsed(mm_recipe_preset("fp8_attention_int4_experts"));
  assert_string_equal(chosen(&r, MM_KIND_LINEAR, "model.layers.0.self_attn.qkv_proj", "x"), "block_fp8");
  assert_string_equal(chosen(&r, MM_KIND_EXPERT, "model.layers.0.block_sparse_moe.experts.w13_weight", "x"), "w4afp8");
  mm_recipe_close(&r);
}

/* Names of a stack's experts are those of each expert, and all of them get one scheme. */
TEST(test_stack) {
  static const char *const names[] = {"l.0.experts.w13_weight", "l.0.experts.{e}.w1.weight", "l.0.experts.{e}.w3.weight", NULL};
  static const struct {
    const char *line, *scheme; /* NULL: refused */
  } cases[] = {{"none; l.?.experts.?.w?.weight=int8", "int8"},
               {"none; re:experts\\.\\d\\.w1=int8", "int8"},
               {"none; *experts.{e}.w3*=int8", "int8"},
               {"none; *w13*=bf16; *experts.?.w3*=int8; *.w1.*=mxfp8", "mxfp8"},
               {"int8; *experts.2.*=int8", "int8"},
               {"none; *experts.2.*=int8; *experts*=bf16", "bf16"},
               {"none; *experts.4.*=int8", "none"},
               {"none; *experts.2.*=int8", NULL},
               {"int8; re:experts\\.[01]\\.w1=none", NULL}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    mm_recipe r = parsed(cases[i].line);
    const mm_scheme *s = NULL;
    mm_err err = {0};
    const bool ok = mm_recipe_choose_stack(&r, names, 4, &s, &err);
    if (ok != (cases[i].scheme != NULL)) fail_msg("%s: %s", cases[i].line, err.text);
    if (ok) assert_string_equal(s ? s->name : "none", cases[i].scheme);
    if (!ok) assert_non_null(strstr(err.text, "expected one scheme for all experts of a layer"));
    if (!ok) assert_int_equal(err.status, MM_USAGE);
    mm_recipe_close(&r);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
