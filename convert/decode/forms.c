/* Lending the type and shape of one tensor to those of its name in other layers. */
#include "convert/decode/forms.h"

#include <stdlib.h>
#include <string.h>

typedef struct mm_form_key {
  const char *name;
  uint32_t tensor;
} mm_form_key;

/* Characters of the number that stands between two dots at `at`, as of a layer or an expert, or 0: w1 and w2 are no numbers. */
static size_t number_at(const char *name, const char *at) {
  const size_t n = strspn(at, "0123456789");
  return at > name && at[-1] == '.' && at[n] == '.' ? n : 0;
}

/* Orders names with each number as one character, below all others. */
static int by_kind(const void *a, const void *b) {
  const char *first = ((const mm_form_key *)a)->name, *second = ((const mm_form_key *)b)->name, *x = first, *y = second;
  for (;;) {
    const size_t m = number_at(first, x), n = number_at(second, y);
    if (!m != !n) return m ? -1 : 1;
    if (!m && *x != *y) return (unsigned char)*x - (unsigned char)*y;
    if (!m && *x == 0) return 0;
    x += m ? m : 1;
    y += n ? n : 1;
  }
}

/* True if two names have the same module before their last dot, but for the numbers, as codes and scales of one weight have. */
static bool same_module(const char *a, const char *b) {
  const char *x = a, *y = b, *end = strrchr(a, '.');
  while (end && x <= end) {
    const size_t m = number_at(a, x), n = number_at(b, y);
    if (!m != !n || (!m && *x != *y)) return false;
    x += m ? m : 1;
    y += n ? n : 1;
  }
  return end && !strchr(y, '.');
}

/* Marks the groups that need a header: those of several names, and those of one whose module has other tensors, since the types of a
 * quantised weight follow from no rule. key[] is in the order of by_kind, in which the groups of a module are neighbours. */
static void mark_needed(mm_forms *f, const mm_hf *hf, const mm_form_key *key) {
  for (size_t i = 0; i < hf->tensor_count; i++) {
    const uint32_t group = f->group[key[i].tensor];
    for (size_t j = i == 0 ? 0 : i - 1; j < hf->tensor_count && j <= i + 1; j++)
      if (j != i && (f->group[key[j].tensor] == group || (!hf->tensor[key[i].tensor].left_out && same_module(key[i].name, key[j].name))))
        f->needed[group] = true;
  }
}

bool mm_forms_open(mm_forms *f, const mm_hf *hf, mm_err *err) {
  *f = (mm_forms){.group = mm_calloc(hf->tensor_count, sizeof *f->group, err),
                  .needed = mm_calloc(hf->tensor_count, sizeof *f->needed, err)};
  mm_form_key *key = mm_calloc(hf->tensor_count, sizeof *key, err);
  const bool ok = f->group && f->needed && key;
  for (uint32_t i = 0; ok && i < hf->tensor_count; i++) key[i] = (mm_form_key){hf->tensor[i].original, i};
  if (ok) mm_sort(key, hf->tensor_count, sizeof *key, by_kind);
  for (size_t i = 0; ok && i < hf->tensor_count; i++) {
    if (i == 0 || by_kind(&key[i - 1], &key[i]) != 0) f->groups++;
    f->group[key[i].tensor] = f->groups - 1;
  }
  if (ok) mark_needed(f, hf, key);
  free(key);
  return ok;
}

void mm_forms_close(mm_forms *f) {
  MM_FREE(f->group, f->needed);
  *f = (mm_forms){0};
}

/* [groups]: a tensor of it whose header was seen, or NULL. free() it. */
static const mm_hf_tensor **find_seen(const mm_forms *f, const mm_hf *hf, mm_err *err) {
  const mm_hf_tensor **seen = mm_calloc(f->groups + 1, sizeof *seen, err);
  for (size_t i = 0; seen && i < hf->tensor_count; i++)
    if (hf->tensor[i].found) seen[f->group[i]] = &hf->tensor[i];
  return seen;
}

bool mm_forms_lack(const mm_forms *f, const mm_hf *hf, uint32_t *file, mm_err *err) {
  const mm_hf_tensor **seen = find_seen(f, hf, err);
  *file = UINT32_MAX;
  for (size_t i = 0; seen && i < hf->tensor_count; i++)
    if (f->needed[f->group[i]] && !seen[f->group[i]] && hf->tensor[i].file < *file) *file = hf->tensor[i].file;
  free(seen);
  return *file != UINT32_MAX;
}

bool mm_forms_lend(const mm_forms *f, mm_hf *hf, mm_err *err) {
  const mm_hf_tensor **seen = find_seen(f, hf, err);
  for (size_t i = 0; seen && i < hf->tensor_count; i++) {
    const mm_hf_tensor *from = seen[f->group[i]];
    mm_hf_tensor *t = &hf->tensor[i];
    if (t->found || !from) continue;
    t->dtype = from->dtype;
    t->shape = from->shape;
    t->bytes = from->bytes;
  }
  const bool ok = seen;
  free(seen);
  return ok;
}
