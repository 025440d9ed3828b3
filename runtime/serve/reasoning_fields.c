/* One table of the fields that say the same thing. */
#include "runtime/serve/reasoning_fields.h"

#include <string.h>

#include "runtime/chat/arguments.h"
#include "runtime/serve/apis.h"
#include "runtime/serve/fields.h"

/* What a field asks for. */
typedef enum wish {
  NOTHING,
  LEVEL, /* an effort without effect: it contradicts other efforts alone */
  ANY,   /* reasoning, in whichever mode */
  ADAPTIVE,
  ENABLED,
  DISABLED
} wish;

typedef enum values { SWITCH, MODE, EFFORT, PERMISSION } values;

/* Efforts and the switch of `reasoning` are one family, in which a level asks for reasoning. */
typedef struct reasoning_field {
  const char *object, *key, *name; /* object NULL: the request itself */
  values values;
  bool effort;
} reasoning_field;

static const reasoning_field fields[] = {
    {"chat_template_kwargs", "enable_thinking", "chat_template_kwargs.enable_thinking", SWITCH, false},
    {"chat_template_kwargs", "thinking_mode", "chat_template_kwargs.thinking_mode", MODE, false},
    {"thinking", "type", "thinking.type", MODE, false},
    {"reasoning", "effort", "reasoning.effort", EFFORT, true},
    {"reasoning", "reasoning_effort", "reasoning.reasoning_effort", EFFORT, true}, /* this and the next but one: SGLang's */
    {"reasoning", "enabled", "reasoning.enabled", PERMISSION, true},
    {"reasoning", "enable", "reasoning.enable", PERMISSION, true},
    {NULL, "reasoning_effort", "reasoning_effort", EFFORT, true},
    {NULL, "enable_thinking", "enable_thinking", PERMISSION, false},
};
#define FIELDS (sizeof fields / sizeof *fields)

static const char *param_of(const reasoning_field *f) { return f->object ? f->object : f->key; }

static bool read_mode(mm_call *c, const mm_value *v, const reasoning_field *f, wish *out) {
  *out = mm_value_is(v, "disabled") ? DISABLED : mm_value_is(v, "enabled") ? ENABLED : mm_value_is(v, "adaptive") ? ADAPTIVE : NOTHING;
  return *out || mm_refuse(c, 400, param_of(f), "%s: found %.60s, expected enabled, adaptive or disabled", f->name, MM_SHOWN_VALUE(v));
}

static bool read_wish(mm_call *c, const reasoning_field *f, wish *out) {
  const mm_value *object = c->body, *v;
  *out = NOTHING;
  if (f->object && !mm_field(c, c->body, f->object, MM_VALUE_OBJECT, &object)) return false;
  const mm_value_type type = f->values == SWITCH || f->values == PERMISSION ? MM_VALUE_BOOL : MM_VALUE_STRING;
  if (!object || !(v = mm_value_get(object, f->key))) return true;
  if (f->values == MODE) return read_mode(c, v, f, out);
  if (!mm_field(c, object, f->key, type, &v)) return false;
  if (f->values == EFFORT)
    *out = mm_chat_effort(c->server->format, mm_str_of(v)) == MM_THINKING_DISABLED ? DISABLED : v->n ? LEVEL : NOTHING;
  else
    *out = !v->truth ? DISABLED : f->values == SWITCH ? ENABLED : ANY;
  return true;
}

static bool contradict(const mm_call *c, size_t i, wish a, size_t k, wish b) {
  if (a == NOTHING || b == NOTHING || a == b) return false;
  if (a == LEVEL || b == LEVEL) return fields[i].effort && fields[k].effort && (a == DISABLED || b == DISABLED);
  if (a == DISABLED || b == DISABLED) return true;
  return a != ANY && b != ANY && c->server->format && c->server->format->tags->minimal; /* adaptive and enabled are one elsewhere */
}

bool mm_reasoning_read(mm_call *c, mm_conversation *v) {
  static const mm_thinking mode[] = {[ADAPTIVE] = MM_THINKING_ADAPTIVE, [ENABLED] = MM_THINKING_ENABLED, [DISABLED] = MM_THINKING_DISABLED};
  const bool responses = c->api == &mm_api_responses || c->api == &mm_api_count_responses;
  const mm_chat_format *format = c->server->format;
  wish said[FIELDS];
  for (size_t i = 0; i < FIELDS; i++) {
    const reasoning_field *f = &fields[i];
    if (responses && f->object && strcmp(f->object, "thinking") == 0) /* the table of fields lets those that enable it pass */
      said[i] = mm_value_get(c->body, "thinking") ? ANY : NOTHING;
    else if (!read_wish(c, f, &said[i]))
      return false;
    for (size_t k = 0; k < i; k++)
      if (contradict(c, i, said[i], k, said[k])) return mm_refuse(c, 400, param_of(f), "%s: contradicts %s", f->name, fields[k].name);
  }
  for (size_t i = 0; i < FIELDS; i++) {
    if (said[i] < ADAPTIVE) continue;
    if (said[i] == DISABLED && format && !format->tags->optional) {
      if (c->api->anthropic && fields[i].values == MODE && strcmp(fields[i].object, "thinking") == 0) continue;
      return mm_refuse(c, 400, param_of(&fields[i]), "%s: %s has no form for a reply without reasoning", fields[i].name, format->name);
    }
    if (v->thinking < mode[said[i]]) v->thinking = mode[said[i]];
  }
  return true;
}

static bool take_budget(mm_call *c, const mm_value *object, const char *field, int64_t *most) {
  int64_t n = -1;
  if (!mm_field_int(c, object, field, -1, INT32_MAX, &n)) return false;
  if (n >= 0 && (*most < 0 || n < *most)) *most = n;
  return true;
}

bool mm_reasoning_budget(mm_call *c, int64_t *most) {
  static const char *const names[] = {"thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"};
  const bool optional = c->server->format->tags->optional;
  *most = -1;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (!take_budget(c, c->body, names[i], most)) return false;
    if (*most >= 0 && !optional) return mm_refuse(c, 400, names[i], "%s: no token ends the reasoning of this model", names[i]);
  }
  if (!take_budget(c, mm_value_get(c->body, "thinking"), "budget_tokens", most) ||
      !take_budget(c, mm_value_get(c->body, "reasoning"), "max_tokens", most))
    return false;
  if (!optional) *most = -1;
  return true;
}

bool mm_reasoning_excluded(mm_call *c, bool *excluded) {
  const mm_value *object;
  *excluded = false;
  return mm_field(c, c->body, "reasoning", MM_VALUE_OBJECT, &object) && mm_field_bool(c, object, "exclude", excluded);
}
