/* Printing notes about a source. */
#include "convert/report/notes.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "convert/source/encoding.h"
#include "loader/dflash.h"

/* Quantised matrices of this kind that no rule of the recipe names; *example is the first of them. */
static size_t unquantised(const mm_plan *p, mm_kind kind, const mm_plan_tensor **example) {
  size_t n = 0;
  *example = NULL;
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_plan_tensor *pt = &p->tensor[i];
    if (!pt->as_stored || pt->rule[0]->kind != kind || pt->scheme->code != MM_CODE_PLAIN || mm_is_plain(&pt->matrix[0])) continue;
    if (n++ == 0) *example = pt;
  }
  return n;
}

/* Tensors of parts that the packed checkpoint does not hold, such as a vision tower. */
static void put_left_out(FILE *f, const mm_pack *p) {
  uint64_t tensors = 0, bytes = 0;
  for (size_t i = 0; i < p->left_out_count; i++) tensors += p->left_out[i].tensors, bytes += p->left_out[i].bytes;
  if (!tensors) return;
  fprintf(f, "note: %llu tensors (%llu bytes) are left out, text only:", (unsigned long long)tensors, (unsigned long long)bytes);
  for (size_t i = 0; i < p->left_out_count; i++) {
    fputs(i ? ", " : " ", f);
    mm_show_to(f, p->left_out[i].prefix);
    fputc('*', f);
  }
  fputc('\n', f);
}

/* The draft of a packed source, for which the other layout has no place. */
static void put_draft(FILE *f, const mm_hf *hf, const mm_plan *p) {
  const mm_pack *from = p->layout->extras ? NULL : hf->manifest;
  if (from && mm_pack_find_file(from, MM_DFLASH_FILE))
    fprintf(f, "note: the draft of the source (%s) is left out: --layout hf has none\n", MM_DFLASH_FILE);
}

/* A factor of RoPE that the plan's model does not have: it stands with the type "default". */
static void put_idle_factor(FILE *f, const mm_json *config) {
  static const char *const in[] = {"rope_scaling", "rope_parameters"};
  for (size_t i = 0; i < 2; i++)
    if (mm_json_type_of(mm_json_get(mm_json_get(config, in[i]), "factor")) != MM_JSON_NULL)
      fprintf(f, "note: %s.factor has no effect with the type \"default\"\n", in[i]);
}

/* The kinds of inputs that the source's description gives a linear kept as stored; 0 where it has that of its scheme, or says nothing. */
static unsigned other_inputs(const mm_hf *hf, const mm_plan_tensor *pt) {
  if (!pt->as_stored || pt->scheme->code == MM_CODE_PLAIN || mm_is_plain(&pt->matrix[0])) return 0;
  const unsigned set = hf->quantization.inputs.of[mm_numbers_of(pt->matrix[0].encoding->code)];
  return set >> mm_numbers_of(mm_act_formats[pt->scheme->act].code) & 1 ? 0 : set;
}

/* Linears whose inputs the source's engines round otherwise than the scheme that keeps the weights; a line for each scheme. */
static void put_inputs(FILE *f, const mm_hf *hf, const mm_plan *p) {
  char theirs[96], ours[96];
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_plan_tensor *pt = &p->tensor[i];
    const unsigned set = other_inputs(hf, pt), own = 1u << mm_numbers_of(mm_act_formats[pt->scheme->act].code);
    size_t n = 0, before = 0;
    for (size_t j = 0; set && j < p->pack.tensor_count; j++)
      if (p->tensor[j].scheme == pt->scheme && other_inputs(hf, &p->tensor[j]) == set) n++, before += j < i;
    if (n == 0 || before > 0) continue;
    fprintf(f, "note: the source declares inputs of its %s weights %s, %s takes them %s%s (tensors: %zu)\n", pt->matrix[0].encoding->name,
            mm_numbers_words(set, theirs), pt->scheme->name, mm_numbers_words(own, ours),
            own == 1u << MM_NUMBERS_PLAIN ? "" : " unless run with --act-quant off", n);
  }
}

/* A description of how inputs are scaled that the source's tensors do not bear out. */
static void put_scales(FILE *f, const mm_hf *hf, const mm_plan *p) {
  const unsigned declared = hf->quantization.scales;
  const uint64_t given = p->calibrated.given;
  size_t n = 0;
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    n += p->tensor[i].as_stored && !mm_is_plain(&p->tensor[i].matrix[0]) && mm_act_formats[p->tensor[i].scheme->act].fixed;
  if (declared == MM_SCALES_DYNAMIC && given)
    fprintf(f, "note: the source declares dynamic scales of activations, but has static ones, which are taken (matrices: %" PRIu64 ")\n",
            given);
  if (declared == MM_SCALES_STATIC && n && !given && !p->calibrated.scaled && !hf->names_only)
    fprintf(f, "note: the source declares static scales of activations, but has none; each token gets its own (tensors: %zu)\n", n);
}

/* Zero points that GPTQ's two formats store differently, in a file that does not say which it has. */
static void put_assumed_zeros(FILE *f, const mm_hf *hf, const mm_plan *p) {
  size_t n = 0;
  for (size_t i = 0; hf->quantization.less_assumed && i < p->pack.tensor_count; i++) {
    const mm_matrix *x = &p->tensor[i].matrix[0];
    n += x->encoding->less && x->part[MM_ZERO].tensor && !x->symmetric;
  }
  if (n)
    fprintf(f,
            "note: no checkpoint_format is declared; zero points are taken as GPTQ's first format stores them, one less (tensors: %zu)\n",
            n);
}

void mm_report_notes(FILE *f, const mm_hf *hf, const mm_plan *p) {
  const struct mm_calibrated *c = &p->calibrated;
  const size_t past = mm_hf_past_last(hf, &p->pack.model);
  const mm_plan_tensor *pt;
  uint64_t bytes;
  size_t n;
  if (past) fprintf(f, "note: layers past the last, for multi-token prediction, are left out (tensors: %zu)\n", past);
  put_left_out(f, &p->pack);
  put_draft(f, hf, p);
  put_idle_factor(f, hf->config);
  put_idle_factor(f, mm_json_get(hf->config, "text_config"));
  if (mm_hf_total_wrong(hf, &bytes))
    fprintf(f, "note: the index says total_size %" PRIu64 ", its tensors have %" PRIu64 " bytes\n", hf->total_size, bytes);
  if (hf->quantization.block_assumed)
    fprintf(f, "note: no weight_block_size is declared; blocks of %u x %u are taken, the only ones that fit all scales\n",
            hf->quantization.block.n, hf->quantization.block.k);
  if (c->given > 0 && c->ones == c->given)
    fprintf(f, "note: all static scales of activations are 1 (matrices: %" PRIu64 "), as without calibration; --act-scales gives others\n",
            c->given);
  put_scales(f, hf, p);
  put_inputs(f, hf, p);
  put_assumed_zeros(f, hf, p);
  if ((n = unquantised(p, MM_KIND_EMBED, &pt)))
    fprintf(f, "note: \"%s\" is %s in the source and stored as %s; --head or --override names another scheme (tensors: %zu)\n",
            pt->rule[0]->ours, pt->matrix[0].encoding->name, pt->scheme->name, n);
  if ((n = unquantised(p, MM_KIND_PASS_THROUGH, &pt)))
    fprintf(f, "note: routers are %s in the source and stored as %s (tensors: %zu)\n", pt->matrix[0].encoding->name, pt->scheme->name, n);
}

/* True for a file that is not empty. */
static bool lies_there(const mm_hf *hf, const char *name) {
  struct stat st;
  return stat(mm_path_of(hf->dir, name).text, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0;
}

void mm_report_absent(FILE *f, const mm_hf *hf, bool template) {
  if (!lies_there(hf, "tokenizer.json"))
    fputs("note: the source has no tokenizer.json: the output will take no text, only ids; put one into the source first\n", f);
  if (!template)
    fputs(
        "note: the source has no chat template (chat_template.jinja, chat_template.json or in tokenizer_config.json): minimax-serve will "
        "need --chat-format for chats\n",
        f);
}
