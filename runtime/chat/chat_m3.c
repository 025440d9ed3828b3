/* MiniMax-M3's chat format: its template, and the tool calls of its replies. Each tag of a call has the mark before it,
 * arguments are elements, and objects and lists within arguments are elements too. */
#include <string.h>

#include "runtime/chat/elements.h"
#include "runtime/chat/render.h"
#include "runtime/chat/reply_inside.h"

/* ==== The template ==== */

#define BEGIN "]~b]"
#define END   "[e~[\n"
#define MARK  MM_CHAT_MARK

static const char root_text[] =
    "Your model version is MiniMax-M3, developed by MiniMax. Knowledge cutoff: January 2026. Founded in early 2022, MiniMax is a "
    "global AI foundation model company committed to advancing the frontiers of AI towards AGI.";
static const char thinking_text[] =
    "\n\n<thinking_instructions>\nYou have a thinking capability that allows you to reason step by step before responding. "
    "When thinking is enabled, wrap your reasoning in <mm:think></mm:think> tags before your response. When thinking is "
    "disabled, begin your response directly after the </mm:think> prefix. When thinking is adaptive, decide on your own whether "
    "to think for the current turn.\nCurrent thinking mode: ";
static const char enabled_text[] =
    "enabled. You MUST think step by step before every response, including after receiving function/tool results.\n";
static const char disabled_text[] = "disabled. Do not output any thinking process.\n";
static const char adaptive_text[] =
    "adaptive. You are encouraged to think for complex decision-making, multi-step reasoning, or when analyzing function/tool "
    "results.\n";
static const char calls_text[] =
    "\n\nTo call tools, wrap all invocations in a single " MARK "<tool_call>" MARK
    "</tool_call> block. Parameter values containing nested objects or arrays are recursively expanded into XML elements. "
    "Example:\n\n" MARK "<tool_call>\n" MARK "<invoke name=\"tool-name-1\">" MARK "<param-1>value-1" MARK "</param-1>" MARK "<param-2>" MARK
    "<item>" MARK "<key-a>val-a" MARK "</key-a>" MARK "<key-b>val-b" MARK "</key-b>" MARK "</item>" MARK "</param-2>" MARK
    "</invoke>\n" MARK "<invoke name=\"tool-name-2\">" MARK "<param-1>value-1" MARK "</param-1>" MARK "</invoke>\n" MARK "</tool_call>";

/* ---- System and tools ---- */

static void put_root(mm_renderer *r, const mm_message *m) {
  mm_render_own(r, "]~!b[" BEGIN "system\n");
  if (m && mm_render_has_content(m))
    mm_render_parts(r, m);
  else
    mm_render_own(r, root_text);
  mm_render_own(r, thinking_text);
  switch (r->c->thinking) {
    case MM_THINKING_ENABLED: mm_render_own(r, enabled_text); break;
    case MM_THINKING_DISABLED: mm_render_own(r, disabled_text); break;
    default: mm_render_own(r, adaptive_text); break;
  }
  mm_render_own(r, "</thinking_instructions>" END);
}

static bool put_developer(mm_renderer *r, const mm_message *m) {
  mm_render_own(r, BEGIN "developer\n");
  mm_render_system(r, m);
  if (r->c->tool_count) {
    if (!mm_render_tools(r)) return false;
    mm_render_own(r, calls_text);
  }
  mm_render_own(r, END);
  return true;
}

/* ---- Assistants ---- */

static void put_tag(mm_renderer *r, const char *begin, const char *name, size_t n) {
  mm_render_own(r, begin);
  mm_prompt_put(r->p, MM_OWNER_USER, name, n);
  mm_render_own(r, ">");
}

/* A value as elements. Recursion is bounded by the depth that mm_body_parse reads. */
static void put_elements(mm_renderer *r, const mm_value *v) {
  switch (v->type) {
    case MM_VALUE_NULL: break;
    case MM_VALUE_BOOL: mm_prompt_put(r->p, MM_OWNER_USER, v->truth ? "true" : "false", v->truth ? 4 : 5); break;
    case MM_VALUE_NUMBER:
    case MM_VALUE_STRING: mm_prompt_put(r->p, MM_OWNER_USER, v->text, v->n); break;
    case MM_VALUE_ARRAY:
      for (const mm_value *m = v->first; m; m = m->next) {
        mm_render_own(r, MARK "<item>");
        put_elements(r, m);
        mm_render_own(r, MARK "</item>");
      }
      break;
    case MM_VALUE_OBJECT:
      for (const mm_value *m = v->first; m; m = m->next) {
        if (m->type == MM_VALUE_NULL) continue;
        put_tag(r, MARK "<", m->key, m->key_n);
        put_elements(r, m);
        put_tag(r, MARK "</", m->key, m->key_n);
      }
  }
}

static bool put_calls(mm_renderer *r, const mm_message *m) {
  if (!m->call_count) return true;
  mm_render_own(r, MARK "<tool_call>\n");
  for (size_t i = 0; i < m->call_count; i++) {
    const mm_value *arguments = mm_render_arguments(r, m, &m->call[i]);
    if (!arguments) return false;
    mm_render_own(r, MARK "<invoke name=\"");
    mm_render_str(r, MM_OWNER_USER, m->call[i].name);
    mm_render_own(r, "\">");
    put_elements(r, arguments);
    mm_render_own(r, MARK "</invoke>\n");
  }
  mm_render_own(r, MARK "</tool_call>");
  return true;
}

/* Where the message begins whose tokens are sampled. */
static void put_opening(mm_renderer *r, mm_opening opening) {
  mm_render_own(r, BEGIN "ai\n");
  if (opening == MM_OPENING_REASONING) mm_render_own(r, "<mm:think>");
  if (opening == MM_OPENING_CONTENT) mm_render_own(r, "</mm:think>");
}

/* Reasoning stays in every turn. `open`: the message goes on. */
static bool put_assistant(mm_renderer *r, const mm_message *m, bool open) {
  mm_thought t = {.reasoning = m->reasoning, .owner = MM_OWNER_USER};
  if (!open && m->sampled_count) {
    put_opening(r, m->opening);
    mm_prompt_put_sampled(r->p, m->sampled, m->sampled_count);
    mm_render_own(r, END);
    return true;
  }
  mm_render_own(r, BEGIN "ai\n");
  if (!m->reasoning.p && !mm_render_thought(r, m, &t)) return false;
  if (t.reasoning.n) {
    mm_render_own(r, "<mm:think>");
    mm_render_str(r, t.owner, t.reasoning);
    r->p->in_reasoning = open && mm_render_is_empty(m, &t);
  }
  if (!r->p->in_reasoning) mm_render_own(r, "</mm:think>");
  mm_render_content(r, m, &t);
  if (open) return true;
  if (!put_calls(r, m)) return false;
  mm_render_own(r, END);
  return true;
}

/* ---- The conversation ---- */

/* Results that stand side by side are one message. */
static void put_result(mm_renderer *r, const mm_message *m, const mm_message *first) {
  const mm_message *end = r->c->message + r->c->message_count;
  if (m == first || m[-1].role != MM_ROLE_TOOL) mm_render_own(r, BEGIN "tool");
  mm_render_own(r, "\n<response>");
  mm_render_parts(r, m);
  mm_render_own(r, "</response>");
  if (m + 1 == end || m[1].role != MM_ROLE_TOOL) mm_render_own(r, END);
}

/* Messages from `first` on; later messages of the system are not shown. */
static bool put_messages(mm_renderer *r, const mm_message *first) {
  const mm_message *end = r->c->message + r->c->message_count;
  bool called = false;
  for (const mm_message *m = first; m < end; m++) {
    if (m->role == MM_ROLE_USER) {
      mm_render_own(r, BEGIN "user\n");
      mm_render_parts(r, m);
      mm_render_own(r, END);
      mm_prompt_mark_user(r->p);
    } else if (m->role == MM_ROLE_ASSISTANT) {
      called = m->call_count > 0;
      if (!put_assistant(r, m, m + 1 == end && r->c->continue_final)) return false;
    } else if (m->role == MM_ROLE_TOOL) {
      if (!called) return mm_render_no_call(r, m);
      put_result(r, m, first);
    }
  }
  return true;
}

bool mm_render_m3(mm_renderer *r) {
  const mm_message *m = r->c->message, *end = m + r->c->message_count;
  const mm_message *root = m->role == MM_ROLE_ROOT ? m++ : NULL;
  const mm_message *developer = m < end && m->role == MM_ROLE_SYSTEM ? m++ : NULL;
  put_root(r, root);
  if (!put_developer(r, developer) || !put_messages(r, m)) return false;
  if (!r->c->add_generation_prompt) return true;
  r->p->in_reasoning = r->c->thinking == MM_THINKING_ENABLED;
  r->p->opening = r->p->in_reasoning ? MM_OPENING_REASONING : r->c->thinking == MM_THINKING_DISABLED ? MM_OPENING_CONTENT : MM_OPENING_FREE;
  put_opening(r, r->p->opening);
  return true;
}

/* ==== Replies: calls as elements ==== */

#define TAG    MM_REPLY_MARK /* the mark, within the parser */
#define LEVELS 64            /* elements within elements */

/* The tag opens a call: *name without its quotes; *empty: it closes it too. A name that is empty is none. */
static bool opens_call(const mm_element_tag *t, mm_str *name, bool *empty) {
  static const char word[] = "invoke name=";
  const size_t before = sizeof word - 1;
  if (t->closing || t->name.n < before || memcmp(t->name.p, word, before) != 0) return false;
  *empty = t->name.n > before && t->name.p[t->name.n - 1] == '/';
  *name = mm_block_name(t->name.p + before, t->name.n - before - *empty);
  return name->n > 0;
}

static bool closes(const mm_element_tag *t, const char *name) { return t->closing && mm_str_equal(t->name, (mm_str){name, strlen(name)}); }

/* ---- Calls and parameters ---- */

/* The first n bytes of r->in belong to the call. */
static void eat(mm_reply *r, size_t n) {
  mm_text_add(&r->raw, r->in.p, n);
  mm_block_drop(r, n);
}

/* The text of a call that breaks the grammar is content. */
static void give_up(mm_reply *r) {
  mm_block_show(r);
  mm_reply_emit(r, MM_REPLY_CONTENT, r->raw.p, r->raw.n);
  mm_text_clear(&r->raw);
  mm_text_clear(&r->value);
  r->open = r->streaming = false;
  r->block = MM_BLOCK_STRAY;
}

static void begin_call(mm_reply *r, const mm_element_tag *t, mm_str name, bool empty) {
  mm_text_clear(&r->name);
  mm_text_add(&r->name, name.p, name.n);
  mm_text_clear(&r->raw);
  eat(r, t->used);
  r->open = true;
  r->begun = false;
  mm_reply_emit(r, MM_REPLY_CALL, r->name.p, r->name.n);
  r->block = MM_BLOCK_PARAMETERS;
  if (empty) mm_block_end_call(r);
}

static const mm_value *schema_of(const mm_reply *r, const mm_value **root) {
  *root = mm_tools_schema(r->tools, mm_text_str(&r->name));
  return mm_schema_member(*root, *root, mm_text_str(&r->key));
}

static bool only_text(const mm_reply *r) { return r->types && !(r->types & ~(unsigned)(MM_TYPE_STRING | MM_TYPE_NULL)); }

static void begin_value(mm_reply *r, const mm_element_tag *t) {
  const mm_value *root, *schema;
  mm_text_clear(&r->key);
  mm_text_add(&r->key, t->name.p, t->name.n);
  mm_text_clear(&r->value);
  mm_text_clear(&r->within);
  r->levels = 0;
  schema = schema_of(r, &root);
  r->types = mm_schema_types(root, schema);
  r->streaming = false;
  r->block = MM_BLOCK_VALUE;
  eat(r, t->used);
  if (r->types == MM_TYPE_STRING) mm_block_flow(r, "", 0);
}

/* Text that may still become null, also by its end. */
static bool may_be_null(const mm_text *t) {
  size_t at = 0, word = 0;
  while (at < t->n && mm_is_space(t->p[at])) at++;
  while (at < t->n && word < 4 && (t->p[at] | 0x20) == "null"[word]) at++, word++;
  while (at < t->n && mm_is_space(t->p[at])) at++;
  return at == t->n;
}

static void stream(mm_reply *r, const char *text, size_t n) {
  if (n) mm_block_piece(r, text, n, false, false);
  if (n) mm_block_send(r);
}

/* Text of the parameter; a mark is the byte TAG. */
static void put_text(mm_reply *r, const char *text, size_t n) {
  if (!r->streaming) {
    mm_text_add(&r->value, text, n);
    if (!only_text(r) || r->value.failed || may_be_null(&r->value)) return;
    mm_block_flow(r, "", 0);
    text = r->value.p;
    n = r->value.n;
  }
  for (const char *end = text + n, *mark; text < end; text = mark + (mark < end)) {
    mark = mm_element_text(text, end);
    stream(r, text, (size_t)(mark - text));
    if (mark < end) stream(r, MM_CHAT_MARK, strlen(MM_CHAT_MARK));
  }
}

static void end_value(mm_reply *r) {
  if (r->streaming) {
    mm_block_piece(r, "", 0, false, true);
  } else {
    const mm_value *root, *schema = schema_of(r, &root);
    mm_block_key(r);
    mm_element_value(&r->fragment, root, schema, mm_text_str(&r->value));
  }
  mm_block_send(r);
  mm_text_clear(&r->value);
  r->streaming = false;
  r->block = MM_BLOCK_PARAMETERS;
}

/* ---- The text of a block; each takes what it can of r->in, false: it waits for more ---- */

/* Before a call, or between calls, where a closing tag that closes nothing is dropped. */
static bool at_start(mm_reply *r) {
  const size_t space = mm_block_space(r);
  mm_element_tag t;
  mm_str name;
  bool empty;
  if (r->block == MM_BLOCK_START) mm_text_add(&r->shown, r->in.p, space);
  mm_block_drop(r, space);
  if (!r->in.n) return false;
  const mm_tag_match found = *r->in.p == TAG ? mm_element_take(r->in.p, r->in.n, &t) : MM_TAG_NO;
  if (found == MM_TAG_PARTIAL) return false;
  if (found == MM_TAG_YES && opens_call(&t, &name, &empty))
    begin_call(r, &t, name, empty);
  else if (found == MM_TAG_YES && r->block == MM_BLOCK_NEXT && closes(&t, "invoke"))
    mm_block_drop(r, t.used);
  else
    r->block = MM_BLOCK_STRAY;
  return true;
}

static bool in_stray(mm_reply *r) {
  for (size_t at = 0; at < r->in.n; at++) {
    mm_element_tag t;
    mm_str name;
    bool empty;
    if (r->in.p[at] != TAG) continue;
    const mm_tag_match found = mm_element_take(r->in.p + at, r->in.n - at, &t);
    if (found == MM_TAG_NO || (found == MM_TAG_YES && !opens_call(&t, &name, &empty))) continue;
    mm_block_stray(r, at);
    if (found == MM_TAG_PARTIAL) return false;
    r->block = MM_BLOCK_NEXT;
    return true;
  }
  mm_block_stray(r, r->in.n);
  return false;
}

static bool in_parameters(mm_reply *r) {
  mm_element_tag t;
  mm_str name;
  bool empty;
  eat(r, mm_block_space(r));
  if (!r->in.n) return false;
  const mm_tag_match found = *r->in.p == TAG ? mm_element_take(r->in.p, r->in.n, &t) : MM_TAG_NO;
  if (found == MM_TAG_PARTIAL) return false;
  if (found == MM_TAG_YES && closes(&t, "invoke")) {
    mm_block_drop(r, t.used);
    mm_block_end_call(r);
  } else if (found == MM_TAG_YES && opens_call(&t, &name, &empty)) {
    mm_block_end_call(r); /* its closing tag is missing */
  } else if (found == MM_TAG_YES && !t.closing) {
    begin_value(r, &t);
  } else {
    give_up(r);
  }
  return true;
}

/* The name of the innermost open element: without one, the parameter's. */
static mm_str innermost(const mm_reply *r) {
  if (!r->levels) return mm_text_str(&r->key);
  size_t from = r->within.n - 1;
  while (from && r->within.p[from - 1] != '>') from--;
  return (mm_str){r->within.p + from, r->within.n - 1 - from};
}

/* An element within the parameter opens or closes. */
static void step_level(mm_reply *r, const mm_element_tag *t) {
  if (t->closing) {
    r->within.n -= t->name.n + 1;
    r->levels--;
  } else {
    mm_text_add(&r->within, t->name.p, t->name.n);
    mm_text_put(&r->within, ">");
    r->levels++;
  }
  put_text(r, &(char){TAG}, 1);
  put_text(r, t->closing ? "</" : "<", t->closing ? 2 : 1);
  put_text(r, t->name.p, t->name.n);
  put_text(r, ">", 1);
}

static bool in_value(mm_reply *r) {
  const char *mark = mm_element_text(r->in.p, r->in.p + r->in.n);
  const size_t text = (size_t)(mark - r->in.p);
  mm_element_tag t;
  if (text) put_text(r, r->in.p, text);
  eat(r, text);
  if (!r->in.n) return false;
  const mm_tag_match found = mm_element_take(r->in.p, r->in.n, &t);
  if (found == MM_TAG_PARTIAL) return false;
  if (found == MM_TAG_NO || (t.closing ? !mm_str_equal(t.name, innermost(r)) : r->levels == LEVELS)) {
    give_up(r);
    return true;
  }
  const bool ends = t.closing && !r->levels;
  if (!ends) step_level(r, &t);
  eat(r, t.used);
  if (ends) end_value(r);
  return true;
}

static void block_text(mm_reply *r) {
  bool more = true;
  while (more && r->in.n && !r->raw.failed) switch (r->block) {
      case MM_BLOCK_START:
      case MM_BLOCK_NEXT: more = at_start(r); break;
      case MM_BLOCK_STRAY: more = in_stray(r); break;
      case MM_BLOCK_PARAMETERS: more = in_parameters(r); break;
      case MM_BLOCK_VALUE: more = in_value(r); break;
      default: more = false; break;
    }
}

/* ---- Ends ---- */

/* A cut call stays open, and its last tag is dropped. A call that the model ended between parameters is whole. */
static void block_end(mm_reply *r, mm_reply_finish finish) {
  if (finish != MM_REPLY_WHOLE) {
    if (!r->literal) mm_text_clear(&r->shown);
    if (r->open || (r->in.n && *r->in.p == TAG)) mm_text_clear(&r->in);
    if (r->in.n) mm_block_stray(r, r->in.n);
    return;
  }
  if (r->open && r->block == MM_BLOCK_PARAMETERS && !r->in.n)
    mm_block_end_call(r);
  else if (r->open)
    give_up(r);
  if (r->in.n) mm_block_stray(r, r->in.n);
}

/* Within a call the tags of a block may be those of an element of the same name. */
static bool is_text(const mm_reply *r, mm_marker m) {
  if (m != MM_MARK_CALLS && m != MM_MARK_CALLS_END) return true;
  if (r->in.n) return false; /* a tag that was begun is none */
  if (m == MM_MARK_CALLS) return r->open;
  return r->block == MM_BLOCK_VALUE && mm_str_equal(innermost(r), (mm_str){"tool_call", 9});
}

const mm_block_parser mm_block_m3 = {block_text, is_text, block_end};
