/* Selecting the groups of attention (attention_groups.h). */
#include "runtime/engine/attention_groups.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Times of a decode step with two groups over those with one: M2's layers in block FP8 on two H200, 1,024 tokens a sequence
 * (docs/scale-out.md). */
static const struct {
  uint32_t sequences;
  double time;
} measured[] = {{16, 1}, {64, 0.99}, {128, 1.01}, {256, 0.96}, {1024, 1}};
enum { MEASURED = sizeof measured / sizeof *measured };

/* The fewest sequences from which on groups were not seen to lose. */
static uint32_t least_sequences(void) {
  size_t i = MEASURED;
  while (i > 0 && measured[i - 1].time <= 1) i--;
  return i < MEASURED ? measured[i].sequences : UINT32_MAX;
}

static void say_times(uint64_t sequences, char line[MM_GROUPS_LINE]) {
  mm_format(line, MM_GROUPS_LINE, "%llu sequence%s at a time at most; measured: groups in", (unsigned long long)sequences,
            sequences == 1 ? "" : "s");
  for (size_t i = 0; i < MEASURED; i++) {
    const size_t n = strlen(line);
    mm_format(line + n, MM_GROUPS_LINE - n, "%s %g%s for %u", i ? "," : "", measured[i].time, i ? "" : " of one's time",
              measured[i].sequences);
  }
  const size_t n = strlen(line);
  mm_format(line + n, MM_GROUPS_LINE - n, " (M2 on two H200)");
}

/* The smallest number of groups whose ranks can share the model's heads. */
static uint32_t fewest_groups(const mm_pack *p) {
  const uint32_t made = mm_pack_groups(p);
  uint32_t n = 1;
  while (n < made && (made % n || !mm_model_cuts(&p->model, p->tp, p->tp / n, p->ep))) n++;
  return n;
}

static uint32_t select_groups(const mm_shards *s, const mm_groups_request *r, char reason[MM_GROUPS_LINE]) {
  const uint32_t made = mm_pack_groups(&s->pack);
  if (made == 1) return snprintf(reason, MM_GROUPS_LINE, "the checkpoint was made for one"), 1;
  if (r->needs_1) return snprintf(reason, MM_GROUPS_LINE, "%s needs one", r->needs_1), 1;
  if (strcmp(r->device, "cpu") == 0)
    return snprintf(reason, MM_GROUPS_LINE, "as the checkpoint was made; there are no times of device cpu"), made;
  say_times(r->sequences, reason);
  return r->sequences >= least_sequences() ? made : fewest_groups(&s->pack);
}

/* Reads a number of groups. */
static bool read_groups(const char *word, bool automatic, uint32_t *groups, mm_err *err) {
  char *end;
  const unsigned long n = strtoul(word, &end, 10);
  if (*word >= '0' && *word <= '9' && !*end && n >= 1 && n <= MM_MAX_TP) return *groups = (uint32_t)n, true;
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--dp: found \"%s\", expected a number from 1 to %u%s", MM_ESCAPED(64, word),
                 MM_MAX_TP, automatic ? " or auto" : "");
}

bool mm_groups_select(mm_shards *s, const mm_groups_request *r, char line[MM_GROUPS_LINE], mm_err *err) {
  const uint32_t made = mm_pack_groups(&s->pack), tp = s->pack.tp;
  uint32_t groups = made;
  char reason[MM_GROUPS_LINE] = "";
  *line = 0;
  if (!r->word) return true;
  if (r->sequences && strcmp(r->word, "auto") == 0)
    groups = select_groups(s, r, reason);
  else if (!read_groups(r->word, r->sequences, &groups, err))
    return false;
  else if (!s->random.linear)
    snprintf(reason, sizeof reason, "the checkpoint was made for %u", made);
  if (!mm_shards_regroup(s, groups, err)) return false;
  mm_format(line, MM_GROUPS_LINE, "attention: %u group%s of %u rank%s by --dp %s%s%.300s", groups, groups == 1 ? "" : "s", tp / groups,
            tp / groups == 1 ? "" : "s", r->word, *reason ? ": " : "", reason);
  return true;
}

bool mm_groups_open(mm_shards *s, const char *dir, const mm_dummy *d, const mm_groups_request *r, char line[MM_GROUPS_LINE], mm_err *err) {
  return mm_shards_open_as(s, dir, d, err) && mm_groups_select(s, r, line, err);
}
