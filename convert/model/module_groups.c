/* Groups of modules whose integers differ in ways that engines take from the configuration: symmetric or with zero points, columns in the
 * order of their groups or not. Which group a module belongs to is what compressed-tensors, GPTQModel and AutoRound say. */
#include "convert/model/module_groups.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "convert/model/pattern.h"

/* How closely a target names a module. The closest decides. */
typedef enum match { NO_MATCH, MATCH_ALL, MATCH_CLASS, MATCH_NAME, MATCH_EXACT } match;

typedef struct target {
  const char *name;   /* a module, or NULL */
  mm_pattern pattern; /* where code is set */
  match as;           /* what a match of it is worth */
} target;

struct mm_module_groups {
  const char *path; /* of the file that declares them */
  const char *keys;
  bool ordered; /* the first of several groups that match decides; otherwise they have to agree */
  size_t count;
  struct mm_module_targets {
    mm_module_group group;
    size_t count;
    target *target;
  } * entry;
};

static bool bad(const char *path, const char *key, const char *found, mm_err *err) {
  return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, NULL),
                 "key \"%s\": found \"%s\", expected names or regular expressions of modules, since groups differ in \"symmetric\" or "
                 "\"actorder\"",
                 key, MM_ESCAPED(64, found));
}

/* Python's re.match begins at the start of a name, re.search anywhere. */
static bool compile(target *t, const char *expression, bool from_start, const mm_declaration *d, const char *key, mm_err *err) {
  mm_err reason = {0};
  const char *text = mm_arena_printf(d->arena, err, from_start ? "re:\\A(?:%s)" : "re:%s", expression);
  t->as = MATCH_NAME;
  if (!text || mm_pattern_compile(&t->pattern, text, d->arena, &reason)) return text;
  return reason.status == MM_USAGE ? bad(d->path, key, expression, err) : mm_fail_as(err, &reason);
}

static mm_module_groups *groups_of(const mm_declaration *d, size_t count, const char *keys, mm_err *err) {
  mm_module_groups *g = mm_arena_alloc(d->arena, sizeof *g, err);
  if (!g) return NULL;
  *g = (mm_module_groups){.path = d->path, .keys = keys, .entry = mm_arena_alloc(d->arena, (count + 1) * sizeof *g->entry, err)};
  return g->entry ? g : NULL;
}

static struct mm_module_targets *add(const mm_declaration *d, mm_module_groups *g, size_t targets, mm_err *err) {
  struct mm_module_targets *e = &g->entry[g->count];
  e->target = mm_arena_alloc(d->arena, (targets + 1) * sizeof *e->target, err);
  if (!e->target) return NULL;
  g->count++;
  return e;
}

static bool add_targets(const mm_declaration *d, struct mm_module_targets *e, const mm_json *targets, const char *name, mm_err *err) {
  for (size_t i = 0; i < mm_json_size(targets); i++) {
    target *t = &e->target[e->count++];
    const char *s = mm_json_str(mm_json_at(targets, i));
    if (!s) return bad(d->path, "targets", name, err);
    if (strncmp(s, "re:", 3) == 0) {
      if (!compile(t, s + 3, true, d, "targets", err)) return false;
    } else if (strcasecmp(s, "Linear") == 0) {
      t->as = MATCH_CLASS; /* every weight that is quantised here is one of such a module */
    } else {
      *t = (target){.name = mm_arena_strndup(d->arena, s, strlen(s), err), .as = MATCH_NAME};
      if (!t->name) return false;
    }
  }
  return true;
}

/* "group" and its other names: columns are out of the order of their groups, and a g_idx says how. "weight" changes nothing that is stored.
 */
static bool read_order(const char *path, const mm_json *v, bool *out, mm_err *err) {
  static const char *const name[] = {"weight", "static", "group", "dynamic"};
  const char *s = mm_json_str(v);
  unsigned i = 0;
  *out = mm_json_type_of(v) == MM_JSON_BOOL && mm_json_bool(v);
  if (mm_json_type_of(v) == MM_JSON_NULL || mm_json_type_of(v) == MM_JSON_BOOL) return true;
  while (s && i < 4 && strcasecmp(s, name[i]) != 0) i++;
  *out = i >= 2;
  return (s && i < 4) ||
         mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, NULL),
                 "key \"actorder\": found %s, expected group, weight, dynamic, static, true, false or null", MM_SHOWN_JSON(v));
}

bool mm_module_group_read(const char *path, const mm_json *weights, mm_module_group *out, mm_err *err) {
  const mm_json *symmetric = mm_json_get(weights, "symmetric");
  const char *type = mm_json_str(mm_json_get(weights, "type"));
  const mm_json_type t = mm_json_type_of(symmetric);
  if (!type)
    return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, NULL), "key \"config_groups\": found %s, expected weights with a type",
                   MM_SHOWN_JSON(weights));
  if (t != MM_JSON_BOOL && t != MM_JSON_NULL)
    return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, NULL), "key \"symmetric\": found %s, expected true or false",
                   MM_SHOWN_JSON(symmetric));
  out->integers = strcasecmp(type, "int") == 0;
  out->zeros = t == MM_JSON_BOOL && !mm_json_bool(symmetric);
  out->symmetric = !out->zeros;
  return read_order(path, mm_json_get(weights, "actorder"), &out->order, err);
}

const mm_module_groups *mm_module_groups_compressed(const mm_declaration *d, const mm_json *groups, mm_err *err) {
  mm_module_groups *g = groups_of(d, mm_json_size(groups), "config_groups", err);
  const mm_json *group;
  const char *name;
  void *iter = NULL;
  bool ok = g;
  while (ok && mm_json_next(groups, &iter, &name, &group)) {
    const mm_json *targets = mm_json_get(group, "targets"), *weights = mm_json_get(group, "weights");
    struct mm_module_targets *e = add(d, g, mm_json_size(targets), err);
    ok = e && (mm_json_type_of(targets) == MM_JSON_ARR || bad(d->path, "targets", name, err)) && add_targets(d, e, targets, name, err) &&
         (mm_json_type_of(weights) == MM_JSON_NULL || mm_module_group_read(d->path, weights, &e->group, err));
  }
  return ok ? g : NULL;
}

/* Rules for single modules over the group of all: GPTQModel's expressions, or AutoRound's names and expressions. */
static bool add_rule(const mm_declaration *d, mm_module_groups *g, const char *name, const mm_json *rule, bool dynamic, mm_err *err) {
  const mm_json *sym = mm_json_get(rule, "sym");
  if (dynamic && strncmp(name, "-:", 2) == 0) return true; /* has no codes */
  struct mm_module_targets *e = add(d, g, 2, err);
  if (!e) return false;
  const char *text = mm_arena_strndup(d->arena, name, strlen(name), err);
  if (!text) return false;
  if (dynamic && strncmp(text, "+:", 2) == 0) text += 2;
  e->group = (mm_module_group){.integers = true, .symmetric = mm_json_type_of(sym) == MM_JSON_BOOL ? mm_json_bool(sym) : d->symmetric};
  e->group.order = d->order;
  if (!dynamic) e->target[e->count++] = (target){.name = text, .as = MATCH_EXACT};
  if (!dynamic && !strpbrk(text, "*+?^$()[]{}|\\")) return true; /* a name alone */
  return compile(&e->target[e->count++], text, dynamic, d, dynamic ? "dynamic" : "extra_config", err);
}

/* True if a rule says otherwise of zero points than all. */
static bool names_other(const mm_declaration *d, const mm_json *rules) {
  const mm_json *rule;
  const char *name;
  void *iter = NULL;
  while (mm_json_next(rules, &iter, &name, &rule)) {
    const mm_json *sym = mm_json_get(rule, "sym");
    if (mm_json_type_of(sym) == MM_JSON_BOOL && mm_json_bool(sym) != d->symmetric && strncmp(name, "-:", 2) != 0) return true;
  }
  return false;
}

bool mm_module_groups_rules(const mm_declaration *d, const mm_json *dynamic, const mm_json *extra, const mm_module_groups **out,
                            mm_err *err) {
  *out = NULL;
  if (!names_other(d, dynamic) && !names_other(d, extra)) return true;
  mm_module_groups *g = groups_of(d, mm_json_size(dynamic) + mm_json_size(extra) + 1, "sym", err);
  const mm_json *const rules[] = {dynamic, extra}, *rule;
  const char *name;
  bool ok = g;
  if (ok) g->ordered = true;
  for (size_t i = 0; i < 2; i++) {
    void *iter = NULL;
    while (ok && mm_json_next(rules[i], &iter, &name, &rule)) ok = add_rule(d, g, name, rule, i == 0, err);
  }
  struct mm_module_targets *all = ok ? add(d, g, 1, err) : NULL;
  if (!all) return false;
  all->group = (mm_module_group){.integers = true, .symmetric = d->symmetric, .order = d->order};
  all->target[all->count++].as = MATCH_ALL;
  *out = g;
  return true;
}

static bool matches(const target *t, const char *path, const char *module, bool *hit, mm_err *err) {
  *hit = !t->name && !t->pattern.code;
  if (t->name) *hit = strcmp(t->name, module) == 0;
  if (!t->pattern.code) return true;
  mm_err reason = {0};
  return mm_pattern_match(&t->pattern, module, hit, &reason) ||
         (reason.status == MM_USAGE ? mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, NULL),
                                              "found an expression that takes too long, expected a simpler one: %s", reason.text)
                                    : mm_fail_as(err, &reason));
}

static bool same_group(const mm_module_group *a, const mm_module_group *b) {
  return a->integers == b->integers && a->zeros == b->zeros && a->symmetric == b->symmetric && a->order == b->order;
}

bool mm_module_groups_find(const mm_module_groups *g, const mm_where *codes, mm_module_group *out, mm_err *err) {
  const char *end = strrchr(codes->tensor, '.');
  const size_t n = end ? (size_t)(end - codes->tensor) : strlen(codes->tensor);
  char module[512];
  match best = NO_MATCH;
  bool agree = true, hit;
  snprintf(module, sizeof module, "%.*s", (int)mm_min(n, sizeof module - 1), codes->tensor);
  for (size_t i = 0; i < g->count; i++)
    for (size_t j = 0; j < g->entry[i].count; j++) {
      const target *x = &g->entry[i].target[j];
      if (x->as < best || (g->ordered && x->as == best)) continue;
      if (!matches(x, g->path, module, &hit, err)) return false;
      if (!hit) continue;
      agree = x->as > best || (agree && same_group(out, &g->entry[i].group));
      best = x->as;
      *out = g->entry[i].group;
    }
  const char *wrong = best == NO_MATCH ? "no group names"
                      : !agree         ? "several groups name"
                      : !out->integers ? "a group of other numbers names"
                                       : NULL;
  return !wrong ||
         mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", *codes,
                 "found integers of a module that %s, expected one of \"%s\" in %s, which differ in zero points or the order of columns",
                 wrong, g->keys, g->path);
}
