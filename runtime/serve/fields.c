/* Fields of requests, and the shared ones, one reader for each group. */
#include "runtime/serve/fields.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "formats/hash.h"
#include "runtime/serve/apis.h"
#include "runtime/serve/field_table.h"

/* The request's own field that this object stands in; NULL: it is the request. */
static const char *field_of(const mm_call *c, const mm_value *object) {
  const mm_value *v = object && object != c->body ? c->body->first : NULL;
  while (v && (object->raw < v->raw || object->raw >= v->raw + v->raw_n)) v = v->next;
  return v ? v->key : NULL;
}

/* As a message names it: behind the request's own field, which is the error's `param`. */
#define NAMED(top, key) (top) ? (top) : "", (top) ? "." : "", key

bool mm_field(mm_call *c, const mm_value *object, const char *key, mm_value_type type, const mm_value **v) {
  static const char *const expected[] = {"null", "a boolean", "a number", "a string", "an array", "an object"};
  *v = mm_value_get(object, key);
  if (!*v || (*v)->type == type) return true;
  const char *top = field_of(c, object);
  return mm_refuse(c, 400, top ? top : key, "%s%s%s: found %s, expected %s", NAMED(top, key), mm_value_word(*v), expected[type]);
}

/* Gives the refusal of a number that is beyond its range the code of pydantic, which vLLM's clients read in the message. */
static bool code_range(mm_call *c, const mm_value *v, double lo, double hi) {
  int64_t whole;
  const double x = mm_value_real(v);
  const bool wide = !mm_value_int(v, &whole); /* a whole number that 64 bits do not hold may round to a bound */
  if (x > hi || (wide && x >= 0x1p63)) c->code = "less_than_equal";
  if (x < lo || (wide && x <= -0x1p63)) c->code = "greater_than_equal";
  const size_t n = strlen(c->reason);
  if (c->code && c->server->compat == MM_COMPAT_VLLM) snprintf(c->reason + n, sizeof c->reason - n, " (%s)", c->code);
  return false;
}

bool mm_field_real(mm_call *c, const mm_value *object, const char *key, double lo, double hi, double *out) {
  const mm_value *v;
  if (!mm_field(c, object, key, MM_VALUE_NUMBER, &v)) return false;
  if (!v) return true;
  const double x = mm_value_real(v);
  if (!(x >= lo && x <= hi)) {
    const char *top = field_of(c, object);
    mm_refuse(c, 400, top ? top : key, "%s%s%s: found %s, expected %g to %g", NAMED(top, key), MM_SHOWN_REAL(x), lo, hi);
    return code_range(c, v, lo, hi);
  }
  *out = x;
  return true;
}

bool mm_field_int(mm_call *c, const mm_value *object, const char *key, int64_t lo, int64_t hi, int64_t *out) {
  const mm_value *v;
  int64_t x;
  if (!mm_field(c, object, key, MM_VALUE_NUMBER, &v)) return false;
  if (!v) return true;
  if (!mm_value_int(v, &x) || x < lo || x > hi) {
    const char *top = field_of(c, object);
    mm_refuse(c, 400, top ? top : key, "%s%s%s: found %.*s, expected an integer from %lld to %lld", NAMED(top, key), (int)mm_min(v->n, 40),
              v->text, (long long)lo, (long long)hi);
    return code_range(c, v, (double)lo, (double)hi);
  }
  *out = x;
  return true;
}

bool mm_field_bool(mm_call *c, const mm_value *object, const char *key, bool *out) {
  const mm_value *v;
  if (!mm_field(c, object, key, MM_VALUE_BOOL, &v)) return false;
  if (v) *out = v->truth;
  return true;
}

/* ---- Sampling ---- */

static bool read_sampling(mm_call *c) {
  mm_sampling *s = &c->params.sampling;
  const mm_value *b = c->body;
  int64_t k = s->top_k;
  if (!mm_field_real(c, b, "temperature", 0, 1e6, &s->temperature) || !mm_field_real(c, b, "top_p", 0, 1, &s->top_p) ||
      !mm_field_int(c, b, "top_k", -1, INT32_MAX, &k) || !mm_field_real(c, b, "min_p", 0, 1, &s->min_p) ||
      !mm_field_real(c, b, "repetition_penalty", 0, 1e3, &s->repetition) || !mm_field_real(c, b, "presence_penalty", -2, 2, &s->presence) ||
      !mm_field_real(c, b, "frequency_penalty", -2, 2, &s->frequency))
    return false;
  if (s->repetition > 0 && s->repetition < 1e-3) /* 0: none, as SGLang has it */
    return mm_refuse(c, 400, "repetition_penalty", "repetition_penalty: found %s, expected 0, or 0.001 to 1000",
                     MM_SHOWN_REAL(s->repetition));
  s->top_k = k < 0 ? 0 : (uint32_t)k; /* -1 is all, as vLLM has it */
  if (s->top_p == 0) s->top_p = 1, s->top_k = 1;
  const mm_value *seed = mm_value_get(b, "seed");
  int64_t given = 0;
  if (seed) {
    if (!mm_field_int(c, b, "seed", INT64_MIN, INT64_MAX, &given)) return false;
    s->seed = (uint64_t)given;
    return true;
  }
  return getrandom(&s->seed, sizeof s->seed, 0) == sizeof s->seed || mm_refuse(c, 500, NULL, "no random numbers");
}

/* True if the member's key is a token's id. */
static bool is_id(const mm_call *c, const mm_value *member, unsigned long long *id) {
  char *end;
  *id = strtoull(member->key, &end, 10);
  return member->key[0] >= '0' && member->key[0] <= '9' && end == member->key + member->key_n && *id < c->server->vocab;
}

/* Names the keys that are no ids, from the first one on. */
static bool refuse_keys(mm_call *c, const mm_value *first) {
  char keys[300], key[96];
  size_t n = 0, count = 0;
  unsigned long long id;
  for (const mm_value *v = first; v; v = v->next) {
    if (is_id(c, v, &id)) continue;
    if (n < sizeof keys - 128) n += (size_t)snprintf(keys + n, sizeof keys - n, "%s\"%s\"", count ? ", " : "", mm_value_key_shown(v, key));
    count++;
  }
  return mm_refuse(c, 400, "logit_bias", "logit_bias: found the key%s %s, expected ids below %u", count > 1 ? "s" : "", keys,
                   c->server->vocab);
}

static bool read_bias(mm_call *c, mm_err *err) {
  const mm_value *bias;
  if (!mm_field(c, c->body, "logit_bias", MM_VALUE_OBJECT, &bias)) return false;
  if (!bias || !bias->count) return true;
  if (bias->count > MM_BIAS_MAX)
    return mm_refuse(c, 400, "logit_bias", "logit_bias: found %zu ids, at most %d may be given", bias->count, MM_BIAS_MAX);
  mm_bias *out = mm_arena_alloc(&c->arena, bias->count * sizeof *out, err);
  if (!out) return false;
  uint32_t n = 0;
  for (const mm_value *v = bias->first; v; v = v->next) {
    unsigned long long id;
    if (!is_id(c, v, &id)) return refuse_keys(c, v);
    const double add = v->type == MM_VALUE_NUMBER ? mm_value_real(v) : NAN;
    if (!(fabs(add) <= 100)) return mm_refuse(c, 400, "logit_bias", "logit_bias: expected numbers from -100 to 100");
    for (uint32_t i = 0; i < n; i++)
      if (out[i].id == (int32_t)id) return mm_refuse(c, 400, "logit_bias", "logit_bias: id %llu is given twice", id);
    out[n++] = (mm_bias){(int32_t)id, add == -100 ? -INFINITY : (float)add};
  }
  c->params.sampling.bias = out;
  c->params.sampling.bias_count = n;
  return true;
}

/* ---- Where the reply ends ---- */

static bool add_stop(mm_call *c, const char *key, const mm_value *v) {
  mm_params *p = &c->params;
  if (v->type != MM_VALUE_STRING) return mm_refuse(c, 400, key, "%s: found %s, expected a string", key, mm_value_word(v));
  if (!v->n) return mm_refuse(c, 400, key, "%s: a stop string is empty", key);
  if (v->n > MM_STOP_MAX) return mm_refuse(c, 400, key, "%s: a stop string has %zu bytes, at most %d may be", key, v->n, MM_STOP_MAX);
  if (p->stop_count == MM_STOPS) return mm_refuse(c, 400, key, "%s: more than %d stop strings", key, MM_STOPS);
  p->stop[p->stop_count++] = (mm_stop){v->text, v->n};
  return true;
}

bool mm_params_stop(mm_call *c, const char *key) {
  const mm_value *stop = mm_value_get(c->body, key);
  if (!stop) return true;
  if (stop->type != MM_VALUE_ARRAY) return add_stop(c, key, stop);
  for (const mm_value *v = stop->first; v; v = v->next)
    if (!add_stop(c, key, v)) return false;
  return true;
}

bool mm_params_limit(mm_call *c, const char *key) {
  const uint32_t given = c->params.max_tokens;
  int64_t most = 0;
  if (!mm_field_int(c, c->body, key, 1, INT32_MAX, &most)) return false;
  if (most && (!given || most < given)) c->params.max_tokens = (uint32_t)most;
  return true;
}

static bool read_ends(mm_call *c, mm_err *err) {
  mm_params *p = &c->params;
  const mm_server *s = c->server;
  const mm_value *ids;
  bool ignore = false;
  if (!mm_field(c, c->body, "stop_token_ids", MM_VALUE_ARRAY, &ids) || !mm_field_bool(c, c->body, "ignore_eos", &ignore)) return false;
  const size_t own = ignore ? 0 : s->end_count, more = ids ? ids->count : 0;
  if (more > MM_BIAS_MAX) return mm_refuse(c, 400, "stop_token_ids", "stop_token_ids: more than %d ids", MM_BIAS_MAX);
  int32_t *end = mm_arena_alloc(&c->arena, (own + more + 1) * sizeof *end, err);
  if (!end) return false;
  for (size_t i = 0; i < own; i++) end[i] = s->end[i];
  size_t n = own;
  for (const mm_value *v = ids ? ids->first : NULL; v; v = v->next) {
    int64_t id;
    if (!mm_value_int(v, &id) || id < 0 || id >= s->vocab)
      return mm_refuse(c, 400, "stop_token_ids", "stop_token_ids: expected ids below %u", s->vocab);
    end[n++] = (int32_t)id;
  }
  p->end = end;
  p->end_count = (uint32_t)n;
  p->end_own = (uint32_t)own;
  return true;
}

/* ---- The rest ---- */

static bool read_salt(mm_call *c) {
  const mm_value *salt;
  if (!mm_field(c, c->body, "cache_salt", MM_VALUE_STRING, &salt)) return false;
  if (!salt || !salt->n) return true;
  const mm_digest digest = mm_sha256(salt->text, salt->n);
  memcpy(&c->params.salt, &digest, sizeof c->params.salt);
  return true;
}

/* true and false are as many proposals as the server makes, and none. */
static bool read_drafts(mm_call *c) {
  const mm_value *v = mm_value_get(c->body, "speculative");
  int64_t most = MM_DRAFTS;
  if (!v) return true;
  if (v->type == MM_VALUE_BOOL)
    most = v->truth ? MM_DRAFTS : 0;
  else if (v->type != MM_VALUE_NUMBER)
    return mm_refuse(c, 400, "speculative", "speculative: found %s, expected a boolean or a number", mm_value_word(v));
  else if (!mm_field_int(c, c->body, "speculative", 0, MM_DRAFTS, &most))
    return false;
  c->params.drafts = (uint32_t)most;
  c->params.show_drafts = true;
  return true;
}

static bool read_streaming(mm_call *c) {
  const bool served = c->api == &mm_api_chat || c->api == &mm_api_completions; /* elsewhere usage always comes */
  const mm_value *options = NULL;
  mm_params *p = &c->params;
  if (!mm_field_bool(c, c->body, "stream", &p->stream)) return false;
  if (served && !mm_field(c, c->body, "stream_options", MM_VALUE_OBJECT, &options)) return false;
  if (options && !p->stream) return mm_refuse(c, 400, "stream_options", "stream_options: for streams alone");
  return mm_field_bool(c, c->body, "timings_per_token", &p->timings) && mm_field_bool(c, c->body, "return_progress", &p->progress) &&
         mm_field_bool(c, options, "include_usage", &p->include_usage) &&
         mm_field_bool(c, options, "continuous_usage_stats", &p->running_usage);
}

static bool check_as(mm_call *c, mm_field_api api) {
  const char *instead;
  const mm_value *v = mm_field_refused(c->body, api, &instead);
  return !v || mm_refuse(c, 400, v->key, "%s: %s", v->key, instead);
}

bool mm_fields_check(mm_call *c) {
  const mm_api *a = c->api;
  return check_as(c, a == &mm_api_completions                                 ? MM_FIELDS_COMPLETIONS
                     : a == &mm_api_responses || a == &mm_api_count_responses ? MM_FIELDS_RESPONSES
                     : a == &mm_api_messages || a == &mm_api_count_messages   ? MM_FIELDS_MESSAGES
                                                                              : MM_FIELDS_CHAT);
}

bool mm_fields_check_text(mm_call *c) { return check_as(c, MM_FIELDS_COMPLETIONS); }

bool mm_params_read(mm_call *c, mm_err *err) {
  mm_params *p = &c->params;
  bool skip_special = true;
  int64_t n = 1, max = 0, priority = 0;
  const mm_value *echo = mm_value_get(c->body, "echo");
  const int64_t least = !(echo && echo->type == MM_VALUE_BOOL && echo->truth); /* an echoed prompt alone is a reply */
  double time = c->server->request_time;
  if (!mm_fields_check(c) || !read_sampling(c) || !read_bias(c, err) || !read_ends(c, err) || !read_streaming(c) || !read_salt(c) ||
      !read_drafts(c))
    return false;
  if (!mm_params_stop(c, "stop") || !mm_field_bool(c, c->body, "skip_special_tokens", &skip_special) ||
      !mm_field_bool(c, c->body, "include_stop_str_in_output", &p->include_stop) || !mm_field_int(c, c->body, "n", 1, MM_CHOICES, &n) ||
      !mm_field_int(c, c->body, "max_tokens", least, INT32_MAX, &max) ||
      !mm_field_int(c, c->body, "priority", INT32_MIN, INT32_MAX, &priority) || !mm_field_real(c, c->body, "timeout", 0.001, 1e9, &time))
    return false;
  p->n = (uint32_t)n;
  p->max_tokens = (uint32_t)max;
  p->special = !skip_special;
  p->priority = (int)priority;
  if (time > 0) p->deadline = c->begun + time;
  return true;
}
