/* Builds the sections of a reply's constraint. */
#include "runtime/serve/turn.h"

#include <math.h>
#include <string.h>

#include "runtime/chat/elements.h"
#include "runtime/serve/reasoning_fields.h"

/* ---- Pieces ---- */

static mm_section *add(mm_turn_sections *a, mm_section s) {
  a->section[a->count] = s;
  return &a->section[a->count++];
}

static void add_form(mm_turn_sections *a, const mm_form *f) { add(a, (mm_section){.kind = MM_SECTION_FORM, .form = f}); }

static bool find_token(mm_call *c, const char *text, int32_t *id) {
  *id = mm_tokenizer_find(c->server->tokenizer, text);
  return *id >= 0 || mm_refuse(c, 400, NULL, "the tokenizer has no token %s, without which replies cannot be constrained", text);
}

static bool add_token(mm_call *c, mm_turn_sections *a, mm_section_kind kind, const char *text) {
  int32_t id;
  if (!find_token(c, text, &id)) return false;
  add(a, (mm_section){.kind = kind, .id = id});
  return true;
}

/* Ends with the tag of its end or, where `calls`, with a call that begins before it; after a budget of tokens, -1: none, with the tag. */
static bool add_reasoning(mm_call *c, mm_turn_sections *a, mm_section_kind kind, bool calls, int64_t budget) {
  const mm_chat_tags *tags = c->server->format->tags;
  if (!add_token(c, a, kind, tags->think_end)) return false;
  mm_section *s = &a->section[a->count - 1];
  s->call = tags->call_token ? mm_tokenizer_find(c->server->tokenizer, tags->call_token) : -1;
  s->instead = calls && s->call >= 0;
  s->limited = budget >= 0;
  s->most = (uint32_t)budget;
  return true;
}

/* The reasoning of a reply that nothing else constrains up to its end. */
static bool add_limited(mm_call *c, mm_turn_sections *a, bool in_reasoning, int64_t budget) {
  if (!add_reasoning(c, a, MM_SECTION_FREE, true, budget)) return false;
  mm_section *s = &a->section[0];
  s->once = true;
  s->opened = !in_reasoning;
  return in_reasoning || find_token(c, c->server->format->tags->think, &s->open);
}

/* One of some texts. */
bool mm_turn_add_texts(mm_call *c, mm_turn_sections *a, const mm_str *text, size_t count, mm_err *err) {
  const mm_form *f = mm_form_texts(&c->arena, text, count, err);
  if (f) add_form(a, f);
  return f;
}

/* The text with M3's mark as the byte that it is in forms. */
static bool take_marks(mm_call *c, mm_str *text, mm_err *err) {
  const size_t len = strlen(MM_CHAT_MARK);
  char *out = mm_arena_alloc(&c->arena, text->n + 1, err);
  size_t n = 0;
  for (size_t i = 0; out && i < text->n; n++) {
    const bool mark = text->n - i >= len && memcmp(text->p + i, MM_CHAT_MARK, len) == 0;
    out[n] = mark ? MM_REPLY_MARK : text->p[i];
    i += mark ? len : 1;
  }
  *text = (mm_str){out, n};
  return out;
}

/* A single text, whose markers are tokens. */
static bool add_script(mm_call *c, mm_turn_sections *a, mm_str text, mm_err *err) {
  if (c->server->format->tags->marked && !take_marks(c, &text, err)) return false;
  while (text.n) {
    const char *next = NULL, *marker = NULL;
    for (size_t i = 0; i < MM_REPLY_TAGS; i++) {
      const char *p = memmem(text.p, text.n, mm_reply_tag[i], strlen(mm_reply_tag[i]));
      const bool token = p && mm_tokenizer_find(c->server->tokenizer, mm_reply_tag[i]) >= 0;
      if (token && (!next || p < next)) next = p, marker = mm_reply_tag[i];
    }
    const mm_str before = {text.p, next ? (size_t)(next - text.p) : text.n};
    if (a->count + 2 > MM_SECTIONS) return mm_refuse(c, 400, NULL, "the one text of a choice: too many markers");
    if (before.n && !mm_turn_add_texts(c, a, &before, 1, err)) return false;
    if (!next) break;
    if (!add_token(c, a, MM_SECTION_TOKEN, marker)) return false;
    text = (mm_str){next + strlen(marker), text.n - before.n - strlen(marker)};
  }
  return true;
}

/* ---- Calls ---- */

typedef struct wishes {
  const mm_conversation *v;
  const mm_tool_rules *rules;
  bool in_reasoning;
  bool call;   /* one must be made */
  bool strict; /* one that is begun is held to its tool's schema, if the tool says so */
} wishes;

/* The form of the calls; NULL after a refusal or err. */
static const mm_form *calls_form(mm_call *c, const wishes *w, mm_call_place place, mm_err *err) {
  c->blamed = "tools";
  bool *bound = mm_arena_alloc(&c->arena, w->v->tool_count * sizeof *bound, err);
  if (!bound) return NULL;
  for (size_t i = 0; i < w->v->tool_count; i++) bound[i] = w->call || w->v->tool[i].strict;
  if (!c->server->format->tags->call_token && mm_tokenizer_find_added(c->server->tokenizer, "<tool_calls>") >= 0)
    return mm_refuse(c, 400, "tools", "tools: <tool_calls> is a token of this tokenizer, with which calls cannot be constrained"), NULL;
  const mm_call_limits limits = {.family = c->server->format->family,
                                 .tool = w->v->tool,
                                 .tools = w->v->tool_count,
                                 .bound = bound,
                                 .only = w->rules->choice == MM_TOOLS_NAMED ? w->rules->name : (mm_str){0},
                                 .one_call = w->rules->one_call,
                                 .place = place};
  return mm_forms_calls(&c->forms, &limits, err);
}

/* M2, M3: a block of calls, of which the token that begins it is there. M3's form has its end. */
static bool add_block(mm_call *c, mm_turn_sections *a, const wishes *w, mm_err *err) {
  const mm_chat_tags *tags = c->server->format->tags;
  const mm_form *calls = calls_form(c, w, MM_CALLS_ALONE, err);
  if (!calls) return false;
  add_form(a, calls);
  return tags->marked || add_token(c, a, MM_SECTION_TOKEN, tags->calls_end);
}

static bool require_call(mm_call *c, mm_turn_sections *a, const wishes *w, mm_err *err) {
  static const mm_str newlines[] = {{"\n", 1}, {"\n\n", 2}, {"\n\n\n", 3}};
  const mm_chat_tags *tags = c->server->format->tags;
  if (tags->call_token)
    return (!tags->newlines || mm_turn_add_texts(c, a, newlines, 3, err)) && add_token(c, a, MM_SECTION_TOKEN, tags->call_token) &&
           add_block(c, a, w, err);
  const mm_form *calls = calls_form(c, w, MM_CALLS_ALONE, err);
  if (calls) add_form(a, calls);
  return calls;
}

/* Any text, and calls that are held to their tools' schemas. */
static bool allow_calls(mm_call *c, mm_turn_sections *a, const wishes *w, mm_err *err) {
  const char *token = c->server->format->tags->call_token;
  if (token) {
    if (!add_token(c, a, MM_SECTION_FREE, token) || !add_block(c, a, w, err)) return false;
    a->section[a->count - 1].again = true;
    return true;
  }
  const mm_form *prose = calls_form(c, w, w->in_reasoning ? MM_CALLS_IN_REASONING : MM_CALLS_IN_CONTENT, err);
  if (prose) add_form(a, prose);
  return prose;
}

/* M2, M3: content of the form, or a block of calls in its place. */
static bool form_or_call(mm_call *c, mm_turn_sections *a, const wishes *w, const mm_form *form, mm_err *err) {
  const char *token = c->server->format->tags->call_token;
  if (!add_token(c, a, MM_SECTION_FORM, token)) return false;
  a->section[a->count - 1].form = form;
  a->section[a->count - 1].instead = true;
  add(a, (mm_section){.kind = MM_SECTION_END});
  return add_token(c, a, MM_SECTION_TOKEN, token) && add_block(c, a, w, err);
}

/* ---- All of them ---- */

void mm_soften_bias(mm_call *c) {
  mm_bias *bias = (mm_bias *)c->params.sampling.bias; /* the arena's */
  for (uint32_t i = 0; i < c->params.sampling.bias_count; i++) bias[i].add = fmaxf(bias[i].add, -1e30f);
}

bool mm_lexicon_ready(mm_server *s, mm_err *err) {
  pthread_mutex_lock(&s->making);
  if (!s->lexicon) s->lexicon = mm_lexicon_open(s->tokenizer, s->vocab, s->end, s->end_count, err);
  const bool lexicon = s->lexicon;
  pthread_mutex_unlock(&s->making);
  return lexicon;
}

/* What follows the reasoning is free, or calls that are held to their tools' schemas. */
static bool free_reply(mm_call *c, mm_turn_sections *out, const wishes *w, bool limited, int64_t budget, mm_err *err) {
  if (limited && !add_limited(c, out, w->in_reasoning, budget)) return false;
  if (w->strict) return allow_calls(c, out, w, err);
  add(out, (mm_section){.kind = MM_SECTION_FREE, .id = -1});
  return true;
}

bool mm_turn_constrain(mm_call *c, const mm_conversation *v, const mm_tool_rules *r, const mm_turn_settings *set, bool in_reasoning,
                       mm_turn_sections *out, mm_err *err) {
  const mm_content_rule *rule = &set->content;
  const mm_form *form = rule->form;
  const bool token = c->server->format->tags->call_token; /* calls begin with one */
  wishes w = {.v = v, .rules = r, .in_reasoning = in_reasoning};
  w.call = r->choice == MM_TOOLS_REQUIRED || r->choice == MM_TOOLS_NAMED;
  for (size_t i = 0; i < v->tool_count; i++) w.strict |= v->tool[i].strict;
  int64_t budget;
  if (!mm_reasoning_budget(c, &budget)) return false;
  if (in_reasoning && v->thinking == MM_THINKING_DISABLED) budget = 0; /* the reply goes on within a reasoning that is to be none */
  const bool limited = budget >= 0 && (in_reasoning || (c->server->format->tags->minimal && v->thinking < MM_THINKING_ENABLED));
  if (!form && !w.call && !rule->choices && !w.strict && !limited) return true;
  const bool or_call = form && !w.call && v->tool_count; /* the model answers in the form, or calls */
  if ((form || rule->choices) && w.call)
    return mm_refuse(c, 400, rule->field, "%s: not together with a tool_choice that requires a call", rule->field);
  if (or_call && !token) return mm_refuse(c, 400, rule->field, "%s: not together with tools, in the format of this model", rule->field);
  if (rule->choices && w.strict && !w.call)
    return mm_refuse(c, 400, rule->field, "%s: not together with tools that are strict", rule->field);
  if (!mm_lexicon_ready(c->server, err)) return false;
  mm_soften_bias(c);
  if (!w.call && !form && !rule->choices) return free_reply(c, out, &w, limited, budget, err);
  if (in_reasoning && !add_reasoning(c, out, MM_SECTION_UNTIL, token && (w.call || or_call), budget)) return false;
  if (w.call) return require_call(c, out, &w, err);
  if (rule->choices)
    return rule->choices == 1 ? add_script(c, out, rule->choice[0], err) : mm_turn_add_texts(c, out, rule->choice, rule->choices, err);
  if (or_call) return form_or_call(c, out, &w, form, err);
  add_form(out, form);
  return true;
}
