/* /openapi.json: OpenAPI 3.1 of what the tables of pages and fields say. A field's type is its reader's to check, so none is given here. */
#include <stdlib.h>

#include "runtime/serve/apis.h"
#include "runtime/serve/field_table.h"

static const struct {
  const mm_api *api;
  const char *what, *required;
} apis[MM_FIELDS_APIS] = {
    [MM_FIELDS_CHAT] = {&mm_api_chat, "OpenAI's chat completions", "messages"},
    [MM_FIELDS_COMPLETIONS] = {&mm_api_completions, "OpenAI's completions", "prompt"},
    [MM_FIELDS_RESPONSES] = {&mm_api_responses, "OpenAI's responses", "input"},
    [MM_FIELDS_MESSAGES] = {&mm_api_messages, "Anthropic's messages", "messages"},
};

/* Paths of POST that take a few fields of their own. */
static const struct {
  const mm_api *api;
  const char *what, *required; /* NULL: one of several fields */
} others[] = {{&mm_api_count_chat, "how many tokens the prompt of a chat completion has", "messages"},
              {&mm_api_count_responses, "how many tokens the prompt of a response has", "input"},
              {&mm_api_count_messages, "how many tokens the prompt of Anthropic's messages has", "messages"},
              {&mm_api_tokenize, "the tokens of a text (prompt, content) or of messages", NULL},
              {&mm_api_detokenize, "the text of tokens", "tokens"}};

#define RESPONSES(what) "\"responses\":{\"200\":{\"description\":\"" what "\"},\"default\":{\"description\":\"an error\"}}}}"

/* Members of an object: the API's fields of this fate. */
static void put_fields(mm_text *t, mm_field_api api, mm_field_fate fate) {
  const char *comma = "";
  for (size_t i = 0; mm_field_name(i); i++) {
    if (mm_field_fate_of(mm_field_name(i), api) != fate) continue;
    mm_text_put(t, comma);
    mm_text_quote_string(t, mm_field_name(i));
    if (fate == MM_FIELD_REFUSED) {
      mm_text_put(t, ":{\"not\":{},\"description\":");
      mm_text_quote_string(t, mm_field_instead(i));
      mm_text_put(t, "}");
    } else {
      mm_text_put(t, fate == MM_FIELD_SERVED ? ":{}" : ":{\"description\":\"without effect\"}");
    }
    comma = ",";
  }
}

/* A path of POST up to the members of its body's properties. */
static void begin_post(mm_text *t, const char *path, const char *what, const char *required) {
  mm_text_printf(t, "\"%s\":{\"post\":{\"summary\":", path);
  mm_text_quote_string(t, what);
  mm_text_printf(t,
                 ",\"requestBody\":{\"required\":true,\"content\":{\"application/json\":{\"schema\":{\"type\":\"object\",%s%s%s"
                 "\"properties\":{",
                 required ? "\"required\":[\"" : "", required ? required : "", required ? "\"]," : "");
}

static void put_api(mm_text *t, mm_field_api api) {
  begin_post(t, apis[api].api->path, apis[api].what, apis[api].required);
  put_fields(t, api, MM_FIELD_SERVED);
  mm_text_put(t, "},\"x-refused\":{");
  put_fields(t, api, MM_FIELD_REFUSED);
  mm_text_put(t, "},\"x-without-effect\":{");
  put_fields(t, api, MM_FIELD_NO_EFFECT);
  mm_text_put(t, "}}}}}," RESPONSES("the reply, or its events"));
}

static void put_others(mm_text *t) {
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    begin_post(t, others[i].api->path, others[i].what, others[i].required);
    if (others[i].required) mm_text_printf(t, "\"%s\":{}", others[i].required);
    mm_text_put(t, "}}}}}," RESPONSES("what was counted or made") ",");
  }
  mm_text_put(t,
              "\"/v1/models/{name}\":{\"get\":{\"summary\":\"one name of the model\",\"parameters\":[{\"name\":\"name\",\"in\":\"path\","
              "\"required\":true,\"schema\":{\"type\":\"string\"}}]," RESPONSES("found") ",");
}

void mm_openapi_page(mm_server *s, mm_exchange *x) {
  mm_text t = {0};
  const char *path, *what;
  (void)s;
  mm_text_printf(&t, "{\"openapi\":\"3.1.0\",\"info\":{\"title\":\"minimax-serve\",\"version\":\"%s\"},\"paths\":{", MM_VERSION);
  for (int api = 0; api < MM_FIELDS_APIS; api++) {
    put_api(&t, (mm_field_api)api);
    mm_text_put(&t, ",");
  }
  put_others(&t);
  for (size_t i = 0; (path = mm_page_path(i, &what)); i++) {
    mm_text_printf(&t, "%s\"%s\":{\"get\":{\"summary\":", i ? "," : "", path);
    mm_text_quote_string(&t, what);
    mm_text_put(&t, ",\"responses\":{\"200\":{\"description\":\"found\"}}}}");
  }
  mm_text_put(&t, "}}");
  mm_exchange_reply(x, t.failed ? 503 : 200, "application/json", t.failed ? "{}" : t.p, t.failed ? 2 : t.n);
  free(t.p);
}
