/* Compiled forms, by the digests of what they are made of. A form has an arena of its own with copies of its inputs, so that it outlives
 * the request that it was compiled for. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "formats/hash.h"
#include "runtime/constrain/call_form.h"
#include "runtime/constrain/constrain.h"
#include "runtime/constrain/schema.h"
#include "runtime/constrain/whole_text.h"

#define BUCKETS 4096

typedef enum form_source { FROM_SCHEMA, FROM_REGEX, FROM_GRAMMAR, FROM_CALLS } form_source;

typedef struct mm_cached_form cached_form;
struct mm_cached_form {
  mm_digest digest;
  mm_arena arena;
  mm_tools tools;      /* of calls */
  const mm_form *form; /* NULL: a thread compiles it */
  size_t bytes;
  uint32_t holders;           /* that thread too */
  cached_form *next;          /* of its bucket */
  cached_form *newer, *older; /* by their last use */
};

struct mm_form_cache {
  pthread_mutex_t lock; /* of all below, and of `form`, `bytes`, `holders` and the links of every form */
  pthread_cond_t compiled;
  cached_form *bucket[BUCKETS];
  cached_form *newest, *oldest;
  mm_form_cache_stats stats;
};

/* What a form is made of. */
typedef struct recipe {
  form_source source;
  mm_str text; /* of a schema: as the body has it */
  const mm_call_limits *calls;
  const char *where;
} recipe;

mm_form_cache *mm_form_cache_open(size_t bytes, mm_err *err) {
  mm_form_cache *c = mm_calloc(1, sizeof *c, err);
  if (!c) return NULL;
  pthread_mutex_init(&c->lock, NULL);
  pthread_cond_init(&c->compiled, NULL);
  c->stats.bytes_max = bytes;
  return c;
}

static void close_form(cached_form *f) {
  if (!f) return;
  mm_arena_close(&f->arena);
  mm_tools_close(&f->tools);
  free(f);
}

void mm_form_cache_close(mm_form_cache *c) {
  if (!c) return;
  while (c->newest) {
    cached_form *f = c->newest;
    c->newest = f->older;
    close_form(f);
  }
  pthread_mutex_destroy(&c->lock);
  pthread_cond_destroy(&c->compiled);
  free(c);
}

mm_form_cache_stats mm_form_cache_read(mm_form_cache *c) {
  pthread_mutex_lock(&c->lock);
  const mm_form_cache_stats stats = c->stats;
  pthread_mutex_unlock(&c->lock);
  return stats;
}

/* ---- Places, under the lock ---- */

static cached_form **bucket_of(mm_form_cache *c, const mm_digest *d) {
  uint32_t i;
  memcpy(&i, d->byte, sizeof i);
  return &c->bucket[i % BUCKETS];
}

static void unlink_use(mm_form_cache *c, cached_form *f) {
  *(f->newer ? &f->newer->older : &c->newest) = f->older;
  *(f->older ? &f->older->newer : &c->oldest) = f->newer;
}

static void link_use(mm_form_cache *c, cached_form *f) {
  f->newer = NULL;
  f->older = c->newest;
  *(c->newest ? &c->newest->newer : &c->oldest) = f;
  c->newest = f;
}

static cached_form *find(mm_form_cache *c, const mm_digest *d) {
  cached_form *f = *bucket_of(c, d);
  while (f && !mm_digest_equal(&f->digest, d)) f = f->next;
  if (!f) return NULL;
  unlink_use(c, f);
  link_use(c, f);
  return f;
}

static void add(mm_form_cache *c, cached_form *f) {
  cached_form **bucket = bucket_of(c, &f->digest);
  f->next = *bucket;
  *bucket = f;
  link_use(c, f);
  c->stats.forms++;
  c->stats.bytes += f->bytes;
}

static void drop(mm_form_cache *c, cached_form *f) {
  cached_form **at = bucket_of(c, &f->digest);
  while (*at != f) at = &(*at)->next;
  *at = f->next;
  unlink_use(c, f);
  c->stats.forms--;
  c->stats.bytes -= f->bytes;
  close_form(f);
}

/* Drops forms that nobody holds until the others fit. */
static void shrink(mm_form_cache *c) {
  for (cached_form *f = c->oldest, *newer; f && c->stats.bytes > c->stats.bytes_max; f = newer) {
    newer = f->newer;
    if (!f->holders) drop(c, f);
  }
}

/* ---- Compiling ---- */

static void add_text(mm_sha256_state *s, mm_str text) {
  const uint64_t n = text.n;
  mm_sha256_add(s, &n, sizeof n);
  if (text.n) mm_sha256_add(s, text.p, text.n);
}

static mm_digest digest_of(const recipe *r) {
  mm_sha256_state s;
  const uint32_t source = r->source;
  mm_sha256_begin(&s);
  mm_sha256_add(&s, &source, sizeof source);
  add_text(&s, r->text);
  if (r->calls) {
    const mm_call_limits *k = r->calls;
    const uint32_t word[] = {k->family, k->place, k->one_call, k->only.p != NULL};
    mm_sha256_add(&s, word, sizeof word);
    add_text(&s, k->only);
    for (size_t i = 0; i < k->tools; i++) {
      mm_sha256_add(&s, &k->bound[i], sizeof k->bound[i]);
      add_text(&s, k->tool[i].json);
    }
  }
  return mm_sha256_end(&s);
}

static const mm_form *compile_calls(cached_form *f, const mm_call_limits *k, mm_err *err) {
  const mm_call_rules rules = {.family = k->family,
                               .tools = &f->tools,
                               .bound = k->bound,
                               .only = k->only,
                               .one_call = k->one_call,
                               .begun = k->place != MM_CALLS_ALONE};
  if (!mm_tools_open(&f->tools, k->tool, k->tools, err)) return NULL;
  const mm_form *calls = mm_call_form(&f->arena, &rules, err);
  if (!calls || k->place == MM_CALLS_ALONE) return calls;
  return mm_call_prose(&f->arena, calls, k->place == MM_CALLS_IN_REASONING, err);
}

static const mm_form *compile_text(cached_form *f, const recipe *r, mm_err *err) {
  const char *text = mm_arena_strndup(&f->arena, r->text.p, r->text.n, err);
  if (!text) return NULL;
  if (r->source == FROM_REGEX) return mm_whole_regex(&f->arena, text, r->text.n, r->where, err);
  if (r->source == FROM_GRAMMAR) return mm_whole_grammar(&f->arena, text, r->text.n, r->where, err);
  const mm_value *schema = mm_body_parse(&f->arena, text, r->text.n, err);
  return schema ? mm_schema_compile(&f->arena, schema, r->where, err) : NULL;
}

/* The form of this digest, held; or a place for it, which is the caller's to fill: its form is NULL. */
static cached_form *find_or_add(mm_form_cache *c, const mm_digest *digest, mm_err *err) {
  cached_form *f;
  while ((f = find(c, digest)) != NULL && !f->form) pthread_cond_wait(&c->compiled, &c->lock);
  if (f) {
    c->stats.hits++;
  } else {
    c->stats.misses++;
    if (!(f = mm_calloc(1, sizeof *f, err))) return NULL;
    f->digest = *digest;
    f->bytes = sizeof *f;
    add(c, f);
  }
  f->holders++;
  return f;
}

/* The form of this recipe, held. Threads that want a form that another one compiles wait for it; where that fails they try it too. */
static const mm_form *hold(mm_held_forms *h, const recipe *r, mm_err *err) {
  mm_form_cache *c = h->cache;
  const mm_digest digest = digest_of(r);
  if (!MM_GROW(h->form, &h->cap, h->count + 1, err)) return NULL;
  pthread_mutex_lock(&c->lock);
  cached_form *f = find_or_add(c, &digest, err);
  if (f && !f->form) {
    pthread_mutex_unlock(&c->lock);
    const mm_form *form = r->calls ? compile_calls(f, r->calls, err) : compile_text(f, r, err);
    const size_t more = mm_arena_bytes(&f->arena) + mm_arena_bytes(&f->tools.arena);
    pthread_mutex_lock(&c->lock);
    f->form = form;
    f->bytes += more;
    c->stats.bytes += more;
    if (!form) drop(c, f), f = NULL;
    pthread_cond_broadcast(&c->compiled);
  }
  if (f) shrink(c), h->form[h->count++] = f;
  pthread_mutex_unlock(&c->lock);
  return f ? f->form : NULL;
}

const mm_form *mm_forms_schema(mm_held_forms *h, const mm_value *schema, const char *where, mm_err *err) {
  return hold(h, &(recipe){.source = FROM_SCHEMA, .text = {schema->raw, schema->raw_n}, .where = where}, err);
}

const mm_form *mm_forms_regex(mm_held_forms *h, mm_str pattern, const char *where, mm_err *err) {
  return hold(h, &(recipe){.source = FROM_REGEX, .text = pattern, .where = where}, err);
}

const mm_form *mm_forms_grammar(mm_held_forms *h, mm_str text, const char *where, mm_err *err) {
  return hold(h, &(recipe){.source = FROM_GRAMMAR, .text = text, .where = where}, err);
}

const mm_form *mm_forms_calls(mm_held_forms *h, const mm_call_limits *r, mm_err *err) {
  return hold(h, &(recipe){.source = FROM_CALLS, .calls = r}, err);
}

void mm_forms_release(mm_held_forms *h) {
  if (h->count) {
    pthread_mutex_lock(&h->cache->lock);
    for (size_t i = 0; i < h->count; i++) h->form[i]->holders--;
    shrink(h->cache);
    pthread_mutex_unlock(&h->cache->lock);
  }
  free(h->form);
  *h = (mm_held_forms){.cache = h->cache};
}

/* ---- Forms without a cache ---- */

const mm_form *mm_form_any_object(void) { return mm_schema_any_object(); }

const mm_form *mm_form_texts(mm_arena *a, const mm_str *text, size_t count, mm_err *err) {
  mm_form *f = mm_arena_alloc(a, sizeof *f, err);
  mm_literal *l = mm_arena_alloc(a, count * sizeof *l, err);
  if (!f || !l) return NULL;
  for (size_t i = 0; i < count; i++) l[i] = (mm_literal){.p = text[i].p, .n = text[i].n};
  *f = (mm_form){.kind = MM_FORM_LITERALS, .exact = true, .literal = l, .count = (uint32_t)count};
  mm_literals_sort(f);
  return f;
}
