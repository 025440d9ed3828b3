/* Turns. */
#include "runtime/serve/turn.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "runtime/chat/arguments.h"
#include "runtime/serve/fields.h"
#include "runtime/serve/history.h"

/* State shared by all turns of a call: mm_call.state. */
typedef struct turns {
  mm_turn_settings set;
  mm_tools tools; /* of the request, which all replies read */
  mm_turn *turn;  /* [turns] */
  uint32_t turns;
} turns;

static void close_turns(void *state) {
  turns *s = state;
  for (uint32_t i = 0; i < s->turns; i++) {
    mm_turn *t = &s->turn[i];
    mm_reply_close(t->reply);
    mm_constraint_close(t->constraint);
    mm_reply_watch_close(t->watch);
    for (size_t k = 0; k < t->calls; k++) {
      free(t->call[k].name.p);
      free(t->call[k].arguments.p);
    }
    MM_FREE(t->call, t->item, t->sampled, t->reasoning.p, t->content.p);
  }
  mm_tools_close(&s->tools);
  free(s->turn);
  free(s);
}

/* ---- From tokens ---- */

static bool add_call(mm_turn *t, const char *prefix) {
  uint8_t random[12];
  if (getrandom(random, sizeof random, 0) != sizeof random || !MM_GROW(t->call, &t->cap, t->calls + 1, MM_IGNORED)) return false;
  mm_turn_call *call = &t->call[t->calls++];
  *call = (mm_turn_call){0};
  size_t n = (size_t)snprintf(call->id, sizeof call->id - 2 * sizeof random, "%s", prefix);
  for (size_t i = 0; i < sizeof random; i++, n += 2) snprintf(call->id + n, 3, "%02x", random[i]);
  return true;
}

static bool add_item(mm_turn *t, const mm_reply_event *e) {
  const bool call = e->kind == MM_REPLY_CALL;
  mm_turn_item *last = t->items ? &t->item[t->items - 1] : NULL;
  if (!call && last && last->kind == e->kind) {
    last->n += e->n;
    return true;
  }
  if (!MM_GROW(t->item, &t->items_cap, t->items + 1, MM_IGNORED)) return false;
  const size_t from = call ? 0 : e->kind == MM_REPLY_REASONING ? t->reasoning.n : t->content.n;
  t->item[t->items++] = (mm_turn_item){.kind = e->kind, .from = from, .n = call ? 0 : e->n, .call = e->call};
  return true;
}

/* The last name or arguments of a call's object count, unless a stream has sent the first. */
static void say_again(mm_turn *t, const mm_reply_event *e) {
  mm_turn_call *call = &t->call[e->call];
  mm_text *text = e->kind == MM_REPLY_NAME_AGAIN ? &call->name : &call->arguments;
  if (t->choice->call->params.stream) return;
  mm_text_clear(text);
  mm_text_add(text, e->text, e->n);
}

static void on_event(void *user, const mm_reply_event *e) {
  mm_turn *t = user;
  const turns *s = t->choice->call->state;
  const bool enough = t->one_call && t->calls && t->call[t->calls - 1].ended; /* a call that went wrong is not the one */
  if (t->failed || enough || (s->set.no_reasoning && e->kind == MM_REPLY_REASONING)) return;
  if (e->kind <= MM_REPLY_CALL && !add_item(t, e)) t->failed = true;
  switch (e->kind) {
    case MM_REPLY_REASONING: mm_text_add(&t->reasoning, e->text, e->n); break;
    case MM_REPLY_CONTENT: mm_text_add(&t->content, e->text, e->n); break;
    case MM_REPLY_CALL:
      if (!add_call(t, s->set.call_prefix))
        t->failed = true;
      else
        mm_text_add(&t->call[t->calls - 1].name, e->text, e->n);
      break;
    case MM_REPLY_ARGUMENTS: mm_text_add(&t->call[e->call].arguments, e->text, e->n); break;
    case MM_REPLY_CALL_END:
      t->call[e->call].ended = true;
      mm_arguments_unite(&t->call[e->call].arguments);
      break;
    case MM_REPLY_NAME_AGAIN:
    case MM_REPLY_ARGUMENTS_AGAIN: say_again(t, e); break;
  }
  t->failed |= t->reasoning.failed || t->content.failed ||
               (t->calls && (t->call[t->calls - 1].name.failed || t->call[t->calls - 1].arguments.failed));
  if (s->set.event && !t->failed && e->kind <= MM_REPLY_CALL_END) s->set.event(t, e);
}

/* Adds the tokens between the last call and the end of the message to a reply that its one call ended. Returns false where its last token
 * goes on behind the call with something else than the newline that the format has there. */
static bool close_calls(mm_turn *t) {
  const mm_server *s = t->choice->call->server;
  const mm_chat_tags *tags = s->format->tags;
  size_t n = 0, count = 0, behind = 0;
  const char *last = mm_tokenizer_bytes(s->tokenizer, t->sampled[t->samples - 1], &n);
  while (behind < n && last[n - behind - 1] != '>') behind++;
  if (behind > 1 || (behind && last[n - 1] != '\n')) return false;
  char text[80];
  int32_t *id = NULL;
  snprintf(text, sizeof text, "%s%s%s", behind ? "" : "\n", tags->marked ? MM_CHAT_MARK : "", tags->calls_end);
  const bool ok = mm_tokenizer_encode(s->tokenizer, text, strlen(text), true, &id, &count, MM_IGNORED) &&
                  MM_GROW(t->sampled, &t->samples_cap, t->samples + count, MM_IGNORED);
  if (ok) memcpy(t->sampled + t->samples, id, count * sizeof *id), t->samples += count;
  free(id);
  return ok;
}

/* Keeps the reply's tokens for later requests that send the message back. */
static void keep(mm_turn *t) {
  mm_call *c = t->choice->call;
  mm_chat_call *call = mm_arena_alloc(&c->arena, t->calls * sizeof *call, MM_IGNORED);
  const mm_chat_part part = {.text = {t->content.p ? t->content.p : "", t->content.n}, .owner = MM_OWNER_USER};
  if (!call || (t->choice->ending.enough && !close_calls(t))) return;
  for (size_t i = 0; i < t->calls; i++) {
    const mm_turn_call *own = &t->call[i];
    if (!own->ended) return;
    call[i] = (mm_chat_call){
        .id = {own->id, strlen(own->id)}, .name = {own->name.p, own->name.n}, .arguments = {own->arguments.p, own->arguments.n}};
  }
  const mm_message m = {.role = MM_ROLE_ASSISTANT,
                        .part = &part,
                        .part_count = 1,
                        .reasoning = {t->reasoning.p ? t->reasoning.p : "", t->reasoning.n},
                        .call = call,
                        .call_count = t->calls,
                        .opening = t->opening};
  pthread_mutex_lock(&c->server->shared);
  mm_either_way(mm_replay_add(c->server->replay, &m, t->sampled, t->samples, MM_IGNORED)); /* what is not kept is rendered */
  pthread_mutex_unlock(&c->server->shared);
}

/* Copies: another thread may keep others meanwhile. */
static bool find_sampled(mm_call *c, const mm_conversation *v, mm_err *err) {
  bool ok = true;
  for (size_t i = 0; ok && i < v->message_count; i++) {
    mm_message *m = (mm_message *)&v->message[i]; /* c's arena has it */
    if (m->role != MM_ROLE_ASSISTANT || !m->call_count) continue;
    pthread_mutex_lock(&c->server->shared);
    size_t n = 0;
    const int32_t *id = mm_replay_find(c->server->replay, m, &n, &m->opening);
    int32_t *copy = id ? mm_arena_alloc(&c->arena, (n + 1) * sizeof *copy, err) : NULL;
    if (copy) memcpy(copy, id, n * sizeof *copy);
    pthread_mutex_unlock(&c->server->shared);
    ok = copy || !id;
    m->sampled = copy;
    m->sampled_count = copy ? n : 0;
  }
  return ok;
}

void mm_turn_token(mm_choice *ch, const mm_token *t) {
  mm_turn *turn = ch->state;
  if (!t->end && t->id >= 0 && MM_GROW(turn->sampled, &turn->samples_cap, turn->samples + 1, MM_IGNORED))
    turn->sampled[turn->samples++] = t->id;
  const bool tag = mm_reply_is_tag(ch->call->server->format, t->bytes, t->n); /* other control tokens are no text */
  const bool shown = t->n && (!t->special || ch->call->params.special || tag);
  if (!shown && (t->end || t->id < 0)) return; /* others that are not shown count as tokens of the reasoning */
  if (!mm_reply_push(turn->reply, shown ? t->id : -1, t->bytes, shown ? t->n : 0, MM_IGNORED)) turn->failed = true;
}

/* True if the model ended the message, or the API wanted no more of it. A stop string cuts it off, and so does an id that the request
 * added to those that end a message. */
static bool ended_itself(const mm_choice *ch) {
  const mm_server *s = ch->call->server;
  const mm_ending *e = &ch->ending;
  bool own = e->end_id < 0;
  for (uint32_t i = 0; !own && i < s->end_count; i++) own = s->end[i] == e->end_id;
  return e->reason == MM_FINISH_STOP && e->stop < 0 && own;
}

void mm_turn_ended(mm_choice *ch) {
  mm_turn *t = ch->state;
  t->cut = !ended_itself(ch);
  /* If an item follows a call without an end, the call went wrong before the reply was cut off. */
  if (t->calls && t->items && !t->call[t->calls - 1].ended && t->item[t->items - 1].kind != MM_REPLY_CALL) t->wrong = t->calls;
  const bool stopped = ch->ending.reason == MM_FINISH_STOP;
  if (!mm_reply_end(t->reply, !t->cut ? MM_REPLY_WHOLE : stopped ? MM_REPLY_STOPPED : MM_REPLY_CUT, MM_IGNORED)) t->failed = true;
  t->reasoning_tokens = mm_reply_reasoning_tokens(t->reply);
  const bool said = ch->ending.reason == MM_FINISH_STOP || ch->ending.reason == MM_FINISH_LENGTH;
  if (t->constraint && said && mm_constraint_stuck(t->constraint)) {
    mm_refuse(ch->call, 400, NULL,
              "after %zu bytes of the reply the schema lets nothing follow: found values that do not end, expected at most %d "
              "within each other",
              t->content.n, MM_FORM_DEPTH);
    t->failed = true;
  }
  if (t->failed) ch->ending.reason = MM_FINISH_ERROR;
  const bool whole = !t->failed && !t->cut && t->samples == ch->tokens - (ch->ending.end_id >= 0);
  if (whole && t->calls && t->opening) keep(t);
}

/* True if the last call has an end or went wrong, so that it was not cut off. */
static bool last_settled(const mm_turn *t) { return t->call[t->calls - 1].ended || t->wrong == t->calls; }

bool mm_turn_shows(const mm_turn *t, uint32_t call) { return t->call[call].ended || (t->cut && call + 1 == t->calls && !last_settled(t)); }

bool mm_turn_calls(const mm_turn *t) {
  bool any = false;
  for (size_t i = 0; i < t->calls; i++) any |= t->call[i].ended;
  return any && t->choice->ending.reason == MM_FINISH_STOP && (!t->cut || last_settled(t));
}

/* ---- To tokens ---- */

bool mm_turn_encode(mm_call *c, mm_conversation *v, mm_prompt_tokens *out, bool *in_reasoning, mm_err *err) {
  const mm_server *s = c->server;
  mm_prompt p = {0};
  if (!s->format) return mm_refuse(c, 400, NULL, "no chat: %s", s->no_format);
  c->blamed = c->api->prompt ? c->api->prompt : "messages";
  const bool ok = mm_history_settle(c, v, err) && find_sampled(c, v, err) && mm_chat_render(s->format, v, &p, err) &&
                  mm_prompt_encode(&p, s->tokenizer, s->trust_user, out, err);
  *in_reasoning = p.in_reasoning;
  mm_prompt_close(&p);
  return ok;
}

typedef struct start {
  const mm_tool_rules *rules;
  bool tools, in_reasoning;
  mm_opening opening;
  mm_turn_sections sections;
} start;

static bool open_turns(mm_call *c, const start *a, mm_err *err) {
  turns *s = c->state;
  const mm_reply_settings set = {.format = c->server->format,
                                 .tokenizer = c->server->tokenizer,
                                 .tools = &s->tools,
                                 .calls = a->tools,
                                 .only_calls = a->rules->choice == MM_TOOLS_REQUIRED || a->rules->choice == MM_TOOLS_NAMED,
                                 .in_reasoning = a->in_reasoning,
                                 .append_think = s->set.append_think,
                                 .as_written = s->set.content.as_written,
                                 .sink = on_event};
  if (!(s->turn = mm_calloc(c->params.n, sizeof *s->turn, err))) return false;
  for (; s->turns < c->params.n; s->turns++) {
    mm_turn *t = &s->turn[s->turns];
    mm_reply_settings own = set;
    own.user = t;
    t->event = s->set.event;
    t->one_call = a->rules->one_call;
    t->opening = a->opening;
    if (!(t->reply = mm_reply_open(&own, err))) return false;
    if (c->params.stop_count || t->one_call) t->watch = mm_reply_watch_open(&set, c->params.special, t->one_call, err);
    if ((c->params.stop_count || t->one_call) && !t->watch) return false;
    if (a->sections.count && !(t->constraint = mm_constraint_open(c->server->lexicon, a->sections.section, a->sections.count, err)))
      return false;
  }
  return true;
}

static const uint32_t *allow(void *constraint) { return mm_constraint_allowed(constraint); }
static bool chosen(void *constraint, int32_t id) {
  mm_constraint_chosen(constraint, id);
  return !mm_constraint_over(constraint);
}

static void shape(mm_choice *ch, mm_generation_settings *set) {
  mm_call *c = ch->call;
  turns *s = c->state;
  ch->state = &s->turn[ch->index];
  s->turn[ch->index].choice = ch;
  set->special = true;
  set->constraint = s->turn[ch->index].constraint;
  set->allow = allow;
  set->chosen = chosen;
  set->watch = s->turn[ch->index].watch;
  set->request.boundary = c->boundary;
  set->request.boundary_count = c->boundaries;
}

/* The end of the last message of the user, and the end of the prompt where that is far: a reply that the request began, for other choices
 * and when it comes again. Without any the scheduler takes the end alone. */
static void mark_boundaries(mm_call *c, const mm_prompt_tokens *p) {
  if (!p->user_end || p->user_end >= p->count) return;
  c->boundary[c->boundaries++] = (uint32_t)p->user_end;
  if (p->count > p->user_end + MM_PAGE) c->boundary[c->boundaries++] = (uint32_t)p->count - 1;
}

bool mm_turn_prepare(mm_call *c, mm_conversation *v, const mm_tool_rules *r, const mm_turn_settings *set, mm_err *err) {
  mm_prompt_tokens p = {0};
  start a = {.rules = r, .tools = v->tool_count > 0};
  turns *s = mm_calloc(1, sizeof *s, err);
  if (!s) return false;
  s->set = *set;
  c->state = s;
  c->close_state = close_turns;
  if (!mm_turn_encode(c, v, &p, &a.in_reasoning, err)) return false;
  a.opening = p.opening;
  mark_boundaries(c, &p);
  if (!mm_call_add_prompt(c, p.id, p.count, err) || !mm_tools_open(&s->tools, v->tool, v->tool_count, err)) return false;
  return mm_turn_constrain(c, v, r, set, a.in_reasoning, &a.sections, err) && open_turns(c, &a, err);
}

/* Other forms, which would not be seen within a format. */
static bool refuse_other_forms(mm_call *c, const char *param, const mm_value *format) {
  static const char *const names[][2] = {{"regex", "regex"}, {"grammar", "grammar"}, {"ebnf", "ebnf"}, {"choice", "guided_choice"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    const mm_value *v = mm_value_get(format, names[i][0]);
    if (v && (v->type != MM_VALUE_STRING || v->n))
      return mm_refuse(c, 400, param, "%s.%s: not served there, %s of chat completions and completions is", param, names[i][0],
                       names[i][1]);
  }
  return true;
}

static bool is_bound(const mm_value *schema) { return schema && (schema->type != MM_VALUE_OBJECT || schema->count); }

bool mm_turn_format(mm_call *c, const char *param, const mm_value *format, mm_content_rule *rule, mm_err *err) {
  const mm_value *type = mm_value_get(format, "type"), *schema = mm_value_get(format, "schema"),
                 *nested = mm_value_get(format, "json_schema");
  const bool object = mm_value_is(type, "json_object");
  if (!format) return true;
  if (!refuse_other_forms(c, param, format)) return false;
  if (mm_value_is(type, "text")) /* a schema that says something would not be seen */
    return !(is_bound(schema) || is_bound(mm_value_get(nested, "schema"))) ||
           mm_refuse(c, 400, param, "%s: found a schema next to the type text", param);
  if (!object && !mm_value_is(type, "json_schema"))
    return mm_refuse(c, 400, param, "%s: found the type %.60s, expected text, json_object or json_schema", param,
                     type ? MM_SHOWN_VALUE(type) : "nothing");
  if (nested && (schema || object))
    return mm_refuse(c, 400, param, "%s: found json_schema next to %s", param, schema ? "schema" : "the type json_object");
  if (nested) schema = mm_value_get(nested, "schema");
  if (!object && !schema) return mm_refuse(c, 400, param, "%s: json_schema has no schema", param);
  rule->field = c->blamed = param;
  rule->form = schema ? mm_forms_schema(&c->forms, schema, "json_schema", err) : mm_form_any_object();
  return rule->form;
}

bool mm_turn_format_of(mm_call *c, const char *param, mm_content_rule *rule, mm_err *err) {
  static const char *const misplaced[] = {"type", "schema", "json_schema"};
  const mm_value *object, *format;
  if (!mm_field(c, c->body, param, MM_VALUE_OBJECT, &object) || !mm_field(c, object, "format", MM_VALUE_OBJECT, &format)) return false;
  for (size_t i = 0; i < sizeof misplaced / sizeof *misplaced; i++)
    if (mm_value_get(object, misplaced[i])) return mm_refuse(c, 400, param, "%s: found %s, expected it within format", param, misplaced[i]);
  return mm_turn_format(c, param, format, rule, err);
}

bool mm_turn_start(mm_call *c, mm_err *err) { return mm_call_start(c, shape, err); }
