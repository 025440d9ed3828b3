/* The fields of requests: those of the vendors' APIs, of vLLM, SGLang and llama.cpp, and this server's own. A field that binds a reply or
 * its prompt elsewhere is served or refused, since nobody would see that it was ignored. tests/data/request_fields.tsv says why fields are
 * without effect; a test holds both to each other. */
#include "runtime/serve/field_table.h"

#include <stdlib.h>
#include <string.h>

/* Values that ask for nothing, so that a refused field may have them. Null always does. */
typedef enum nothing {
  NOTHING_NULL,
  NOTHING_ZERO,
  NOTHING_ONE,
  NOTHING_NEGATIVE,
  NOTHING_NOT_POSITIVE,
  NOTHING_N, /* as many as n */
  NOTHING_FALSE,
  NOTHING_TRUE,
  NOTHING_EMPTY,    /* "", [] or {} */
  NOTHING_WORDS,    /* one of `words` */
  NOTHING_CALL,     /* "auto", or "none" where the model sees no tools */
  NOTHING_TEXT,     /* a format of the type text */
  NOTHING_PLAIN,    /* a list of nothing but "text" */
  NOTHING_ENABLED,  /* true, or an object whose type is not disabled */
  NOTHING_LOGPROBS, /* a list without output_text's logprobs */
  NOTHING_WINDOW    /* 0, or any number where nothing is penalised */
} nothing;

typedef struct field {
  const char *name;
  char fate[MM_FIELDS_APIS + 1]; /* 'S'erved, served and 'H'olds the reply to a form, 'R'efused or 'N'o effect, in mm_field_api's order */
  nothing kind;
  const char *instead; /* what is served; NULL where nothing is refused */
  const char *words;   /* with spaces between them */
} field;

#define KNOWN(name, fate) \
  { name, fate, NOTHING_NULL, NULL, NULL }
#define REFUSED(name, fate, kind, instead) \
  { name, fate, NOTHING_##kind, instead, NULL }

/* By name. */
static const field fields[] = {
    KNOWN("access_programs", "NNNN"),
    KNOWN("adaptive_decay", "NNNN"),
    REFUSED("adaptive_target", "RRRR", NEGATIVE, "not served, expected a negative number"),
    REFUSED("add_generation_prompt", "SRRR", TRUE, "chat completions alone serve it"),
    KNOWN("add_special_tokens", "NNNN"),
    REFUSED("allowed_token_ids", "RRRR", EMPTY, "not served; logit_bias is"),
    REFUSED("audio", "RRRR", NULL, "text alone is served"),
    KNOWN("backend_sampling", "NNNN"),
    REFUSED("background", "RRRR", FALSE, "nothing is stored here; send the whole input"),
    KNOWN("background_options", "NNNN"),
    REFUSED("bad_words", "RRRR", EMPTY, "not served; logit_bias is"),
    REFUSED("best_of", "RRRR", N, "only n itself is served"),
    KNOWN("betas", "NNNN"),
    KNOWN("billing_policy", "NNNN"),
    KNOWN("bootstrap_host", "NNNN"),
    KNOWN("bootstrap_port", "NNNN"),
    KNOWN("bootstrap_room", "NNNN"),
    KNOWN("cache_control", "NNNN"),
    KNOWN("cache_prompt", "NNNN"),
    KNOWN("cache_salt", "SSSS"),
    REFUSED("chat_format", "RRRR", ZERO, "the format is the checkpoint's"),
    REFUSED("chat_parser", "RRRR", EMPTY, "the format is the checkpoint's"),
    REFUSED("chat_template", "RRRR", NULL, "the format is the checkpoint's"),
    REFUSED("chat_template_kwargs", "SRSS", EMPTY, "a prompt has no template here"),
    KNOWN("compaction", "NNNN"),
    REFUSED("container", "RRRR", NULL, "code is not run here"),
    KNOWN("context_management", "NNNN"),
    REFUSED("continue_final_message", "SRRR", FALSE,
            "chat completions alone serve it; a last message of the assistant is continued in messages"),
    REFUSED("conversation", "RRRR", NULL, "nothing is stored here; send the whole input"),
    KNOWN("custom_labels", "NNNN"),
    REFUSED("custom_logit_processor", "RRRR", EMPTY, "code of the client is not run"),
    REFUSED("custom_params", "RRRR", EMPTY, "code of the client is not run"),
    KNOWN("data_parallel_rank", "NNNN"),
    KNOWN("diagnostics", "NNNN"),
    KNOWN("disagg_prefill_dp_rank", "NNNN"),
    REFUSED("documents", "RRRR", EMPTY, "give them as messages"),
    KNOWN("dry_allowed_length", "NNNN"),
    KNOWN("dry_base", "NNNN"),
    REFUSED("dry_multiplier", "RRRR", ZERO, "not served, expected 0"),
    KNOWN("dry_penalty_last_n", "NNNN"),
    KNOWN("dry_sequence_breakers", "NNNN"),
    KNOWN("dynatemp_exponent", "NNNN"),
    REFUSED("dynatemp_range", "RRRR", ZERO, "not served, expected 0"),
    REFUSED("early_stopping", "RRRR", FALSE, "beams are not served"),
    REFUSED("ebnf", "HHRR", EMPTY, "not served here; chat completions and completions serve it"),
    KNOWN("ec_transfer_params", "NNNN"),
    REFUSED("echo", "RSRR", FALSE, "completions alone serve it"),
    REFUSED("enable_response_messages", "RRRR", FALSE, "not served"),
    REFUSED("enable_thinking", "RRRR", TRUE, "it belongs into chat_template_kwargs"),
    REFUSED("extra_key", "RRRR", EMPTY, "not served; cache_salt is"),
    KNOWN("fallback_credit_token", "NNNN"),
    KNOWN("fallbacks", "NNNN"),
    KNOWN("frequency_penalty", "SSSS"),
    REFUSED("function_call", "RRRR", CALL, "give it as tool_choice"),
    REFUSED("functions", "RRRR", EMPTY, "give them as tools"),
    REFUSED("generation_prompt", "RRRR", EMPTY, "the format is the checkpoint's"),
    REFUSED("grammar", "HHRR", EMPTY, "not served here; chat completions and completions serve it"),
    REFUSED("grammar_lazy", "RRRR", FALSE, "a grammar holds the whole reply"),
    REFUSED("grammar_triggers", "RRRR", EMPTY, "a grammar holds the whole reply"),
    KNOWN("grammar_type", "NNNN"),
    REFUSED("guided_choice", "HHRR", EMPTY, "not served here; chat completions and completions serve it"),
    KNOWN("guided_decoding_backend", "NNNN"),
    REFUSED("guided_grammar", "HHRR", EMPTY, "not served here; chat completions and completions serve it"),
    REFUSED("guided_json", "HHRR", NULL, "not served here; chat completions and completions serve it"),
    REFUSED("guided_regex", "HHRR", EMPTY, "not served here; chat completions and completions serve it"),
    REFUSED("guided_whitespace_pattern", "RRRR", EMPTY, "blanks of JSON are fixed; a grammar may say where they stand"),
    KNOWN("id_slot", "NNNN"),
    KNOWN("ignore_eos", "SSSS"),
    REFUSED("image", "RRRR", EMPTY, "text alone is served"),
    REFUSED("image_data", "RRRR", EMPTY, "text alone is served"),
    REFUSED("images", "RRRR", EMPTY, "text alone is served"),
    KNOWN("images_config", "NNNN"),
    REFUSED("include", "RRRR", LOGPROBS, "message.output_text.logprobs are not served; logprobs of chat completions are"),
    REFUSED("include_reasoning", "SRRR", TRUE, "chat completions alone serve it"),
    KNOWN("include_stop_str_in_output", "SSSS"),
    KNOWN("inference_geo", "NNNN"),
    REFUSED("input", "RRSR", NULL, "responses alone take it"),
    REFUSED("input_ids", "RRRR", EMPTY, "give a text, or token ids as the prompt of completions"),
    REFUSED("instructions", "RRSR", EMPTY, "give them as a system message"),
    REFUSED("json_schema", "HHRR", NULL, "not served here; chat completions and completions serve it"),
    KNOWN("kv_transfer_params", "NNNN"),
    REFUSED("length_penalty", "RRRR", ONE, "not served, expected 1"),
    KNOWN("logit_bias", "SSSS"),
    REFUSED("logits_processors", "RRRR", EMPTY, "code of the client is not run"),
    REFUSED("logprob_token_ids", "RRRR", EMPTY, "not served; logprobs are"),
    REFUSED("logprobs", "SSRR", FALSE, "chat completions and completions serve them"),
    REFUSED("lora", "RRRR", EMPTY, "adapters are not served"),
    REFUSED("lora_path", "RRRR", EMPTY, "adapters are not served"),
    REFUSED("max_completion_tokens", "SRRR", NULL, "of chat completions; it is max_tokens here, max_output_tokens in responses"),
    KNOWN("max_dynamic_patch", "NNNN"),
    REFUSED("max_output_tokens", "RRSR", NULL, "of responses; it is max_tokens here"),
    KNOWN("max_tokens", "SSSS"),
    KNOWN("max_tool_calls", "NNNN"),
    REFUSED("mcp_servers", "RRRR", EMPTY, "tools are the client's to call"),
    KNOWN("media_io_kwargs", "NNNN"),
    REFUSED("messages", "SRRS", NULL, "chat completions and messages take them"),
    KNOWN("metadata", "NNNN"),
    KNOWN("min_dynamic_patch", "NNNN"),
    REFUSED("min_keep", "RRRR", ZERO, "not served, expected 0"),
    KNOWN("min_p", "SSSS"),
    REFUSED("min_tokens", "RRRR", ZERO, "not served, expected 0"),
    REFUSED("mirostat", "RRRR", ZERO, "not served, expected 0"),
    KNOWN("mirostat_eta", "NNNN"),
    KNOWN("mirostat_tau", "NNNN"),
    KNOWN("mm_payload", "NNNN"),
    KNOWN("mm_processor_kwargs", "NNNN"),
    REFUSED("modalities", "RRRR", PLAIN, "text alone is served"),
    KNOWN("model", "SSSS"),
    REFUSED("moderation", "RRRR", NULL, "nothing is moderated here"),
    REFUSED("multimodal_data", "RRRR", EMPTY, "text alone is served"),
    REFUSED("n", "SSRR", ONE, "one reply alone is served here"),
    KNOWN("n_cache_reuse", "NNNN"),
    REFUSED("n_cmpl", "RRRR", ONE, "not served; n is"),
    KNOWN("n_discard", "NNNN"),
    REFUSED("n_indent", "RRRR", ZERO, "not served, expected 0"),
    KNOWN("n_keep", "NNNN"),
    REFUSED("n_predict", "RRRR", NEGATIVE, "not served; max_tokens is"),
    REFUSED("n_probs", "RRRR", ZERO, "not served; logprobs are"),
    KNOWN("ngram_corpus_id", "NNNN"),
    REFUSED("no_stop_trim", "RRRR", FALSE, "not served; include_stop_str_in_output is"),
    REFUSED("output_config", "RRRH", EMPTY, "of messages; chat completions have response_format, responses text.format"),
    REFUSED("output_format", "RRRR", NULL, "not served; output_config.format of messages is"),
    REFUSED("parallel_tool_calls", "SRSR", TRUE, "messages have tool_choice.disable_parallel_tool_use"),
    REFUSED("parse_special", "RSRR", FALSE, "completions alone serve it"),
    REFUSED("parse_tool_calls", "RRRR", TRUE, "tool_choice none leaves the tools out"),
    REFUSED("post_sampling_probs", "RRRR", FALSE, "not served; logprobs are"),
    KNOWN("prediction", "NNNN"),
    KNOWN("presence_penalty", "SSSS"),
    KNOWN("preserved_tokens", "NNNN"),
    REFUSED("previous_input_messages", "RRRR", EMPTY, "give a text, or token ids as the prompt of completions"),
    REFUSED("previous_response", "RRRR", NULL, "nothing is stored here; send the whole input"),
    REFUSED("previous_response_id", "RRRR", NULL, "nothing is stored here; send the whole input"),
    KNOWN("priority", "SSSS"),
    REFUSED("prompt", "RSRR", NULL, "completions alone take a prompt"),
    KNOWN("prompt_cache_key", "NNNN"),
    KNOWN("prompt_cache_options", "NNNN"),
    KNOWN("prompt_cache_retention", "NNNN"),
    REFUSED("prompt_embeds", "RRRR", EMPTY, "give a text, or token ids as the prompt of completions"),
    REFUSED("prompt_logprobs", "RSRR", NULL, "completions alone serve them"),
    REFUSED("reasoning", "HRHR", EMPTY, "messages have thinking, completions no reasoning"),
    KNOWN("reasoning_budget_end_tag", "NNNN"),
    KNOWN("reasoning_budget_end_tags", "NNNN"),
    KNOWN("reasoning_budget_message", "NNNN"),
    KNOWN("reasoning_budget_start_tag", "NNNN"),
    REFUSED("reasoning_budget_tokens", "HRHH", NEGATIVE, "completions have no reasoning"),
    KNOWN("reasoning_control", "NNNN"),
    REFUSED("reasoning_effort", "SRRR", NULL, "responses have reasoning.effort, messages thinking, completions no reasoning"),
    {"reasoning_format", "RRRR", NOTHING_WORDS, "not served; reasoning_split of chat completions is", "auto deepseek"},
    REFUSED("reasoning_split", "SRRR", TRUE, "chat completions alone serve it"),
    REFUSED("regex", "HHRR", EMPTY, "not served here; chat completions and completions serve it"),
    REFUSED("repeat_last_n", "RRRR", WINDOW, "penalties count the whole reply, expected 0, or no penalty"),
    REFUSED("repeat_penalty", "RRRR", ONE, "not served, expected 1"),
    REFUSED("repetition_detection", "RRRR", NULL, "not served; repetition_penalty is"),
    KNOWN("repetition_penalty", "SSSS"),
    KNOWN("request_id", "NNNN"),
    REFUSED("response_fields", "RRRR", EMPTY, "replies have all their fields"),
    REFUSED("response_format", "HRRR", TEXT,
            "not served here; chat completions serve it, responses have text.format, messages have output_config.format"),
    KNOWN("return_cached_tokens_details", "NNNN"),
    REFUSED("return_flat_raw_output_top_logprobs", "RRRR", FALSE, "not served"),
    REFUSED("return_flat_raw_top_logprobs_b64", "RRRR", FALSE, "not served"),
    REFUSED("return_hidden_states", "RRRR", FALSE, "not served"),
    REFUSED("return_input_ids_in_sglext", "RRRR", FALSE, "token ids are not in the reply; /tokenize gives them"),
    REFUSED("return_meta_info", "RRRR", FALSE, "not served"),
    KNOWN("return_mm_kwargs", "NNNN"),
    REFUSED("return_output_ids_in_sglext", "RRRR", FALSE, "token ids are not in the reply; /tokenize gives them"),
    KNOWN("return_progress", "SSSN"),
    REFUSED("return_prompt_text", "RRRR", FALSE, "not served"),
    REFUSED("return_prompt_token_ids", "RRRR", FALSE, "token ids are not in the reply; /tokenize gives them"),
    REFUSED("return_routed_experts", "RRRR", FALSE, "not served"),
    REFUSED("return_sampling_mask", "RRRR", FALSE, "not served"),
    KNOWN("return_spec_tokens_details", "NNNN"),
    REFUSED("return_token_ids", "RRRR", FALSE, "token ids are not in the reply; /tokenize gives them"),
    KNOWN("return_token_offsets", "NNNN"),
    REFUSED("return_tokens", "RRRR", FALSE, "token ids are not in the reply; /tokenize gives them"),
    REFUSED("return_tokens_as_token_ids", "RRRR", FALSE, "token ids are not in the reply; /tokenize gives them"),
    REFUSED("return_weight_versions", "RRRR", FALSE, "not served"),
    KNOWN("rid", "NNNN"),
    KNOWN("routed_dp_rank", "NNNN"),
    KNOWN("routed_experts_prompt_start", "NNNN"),
    KNOWN("routed_experts_start_len", "NNNN"),
    KNOWN("safety_identifier", "NNNN"),
    REFUSED("samplers", "RRRR", EMPTY, "the order of samplers is fixed"),
    REFUSED("sampling_logprobs_mode", "RRRR", NULL, "not served; logprobs are"),
    KNOWN("seed", "SSSS"),
    REFUSED("separate_reasoning", "RRRR", TRUE, "not served; reasoning_split of chat completions is"),
    KNOWN("service_tier", "NNNN"),
    KNOWN("session_id", "NNNN"),
    REFUSED("session_params", "RRRR", NULL, "nothing is stored here; send the whole input"),
    KNOWN("skip_special_tokens", "SSSS"),
    KNOWN("spaces_between_special_tokens", "NNNN"),
    KNOWN("speculative", "SSSS"),
    KNOWN("speed", "NNNN"),
    KNOWN("sse_ping_interval", "NNNN"),
    KNOWN("stop", "SSSS"),
    REFUSED("stop_regex", "RRRR", EMPTY, "not served; stop is"),
    REFUSED("stop_sequences", "RRRS", EMPTY, "of messages; it is stop here"),
    KNOWN("stop_token_ids", "SSSS"),
    KNOWN("store", "NNNN"),
    KNOWN("stream", "SSSS"),
    KNOWN("stream_interval", "NNNN"),
    KNOWN("stream_options", "SSNN"),
    REFUSED("stream_reasoning", "RRRR", TRUE, "reasoning comes with the reply"),
    REFUSED("structural_tag", "RRRR", NULL, "not served; response_format of chat completions is"),
    REFUSED("structured_outputs", "HHRR", NULL, "not served here; chat completions and completions serve it"),
    REFUSED("suffix", "RRRR", EMPTY, "these models do not fill in"),
    REFUSED("system", "RRRS", EMPTY, "give it as a system message"),
    REFUSED("t_max_predict_ms", "RRRR", NOT_POSITIVE, "not served; timeout is"),
    REFUSED("task", "RRRR", NULL, "not served; say it in the messages"),
    KNOWN("temperature", "SSSS"),
    REFUSED("text", "RRHR", EMPTY, "of responses; chat completions have response_format, messages output_config.format"),
    REFUSED("thinking", "HRRH", ENABLED, "responses have reasoning.effort, completions no reasoning"),
    REFUSED("thinking_budget_tokens", "HRHH", NEGATIVE, "completions have no reasoning"),
    REFUSED("thinking_token_budget", "HRHH", NEGATIVE, "completions have no reasoning"),
    REFUSED("thread", "RRRR", NULL, "nothing is stored here; send the whole input"),
    KNOWN("timeout", "SSSS"),
    KNOWN("timings_per_token", "SSSN"),
    {"tool_choice", "SRSS", NOTHING_WORDS, "chat completions, responses and messages serve it", "auto none"},
    REFUSED("tools", "HRHH", EMPTY, "chat completions, responses and messages serve them"),
    KNOWN("top_k", "SSSS"),
    REFUSED("top_logprobs", "SRRR", ZERO, "chat completions alone serve them; completions have logprobs"),
    REFUSED("top_n_sigma", "RRRR", NEGATIVE, "not served, expected a negative number"),
    KNOWN("top_p", "SSSS"),
    REFUSED("truncate_prompt_tokens", "RRRR", NULL, "prompts are not truncated"),
    KNOWN("truncation", "NNNN"),
    KNOWN("truncation_side", "NNNN"),
    REFUSED("typical_p", "RRRR", ONE, "not served, expected 1"),
    KNOWN("use_audio_in_video", "NNNN"),
    REFUSED("use_beam_search", "RRRR", FALSE, "beams are not served"),
    KNOWN("user", "NNNN"),
    KNOWN("user_profile_id", "NNNN"),
    REFUSED("verbose", "RRRR", FALSE, "not served; /tokenize with messages and with_pieces has the prompt's text"),
    KNOWN("verbosity", "NNNN"),
    KNOWN("video_config", "NNNN"),
    REFUSED("vllm_xargs", "RRRR", EMPTY, "code of the client is not run"),
    REFUSED("watermark", "RRRR", EMPTY, "replies have no watermark"),
    REFUSED("watermarking", "RRRR", FALSE, "replies have no watermark"),
    REFUSED("web_search_options", "RRRR", NULL, "nothing is searched here"),
    KNOWN("workspace_id", "NNNN"),
    REFUSED("xtc_probability", "RRRR", ZERO, "not served, expected 0"),
    KNOWN("xtc_threshold", "NNNN"),
};

static const field *find(const char *name) { return bsearch(&name, fields, sizeof fields / sizeof *fields, sizeof *fields, mm_by_text); }

const char *mm_field_name(size_t i) { return i < sizeof fields / sizeof *fields ? fields[i].name : NULL; }

const char *mm_field_instead(size_t i) { return fields[i].instead; }

mm_field_fate mm_field_fate_of(const char *name, mm_field_api api) {
  const field *f = find(name);
  if (!f) return MM_FIELD_UNKNOWN;
  return strchr("SH", f->fate[api]) ? MM_FIELD_SERVED : f->fate[api] == 'R' ? MM_FIELD_REFUSED : MM_FIELD_NO_EFFECT;
}

bool mm_field_holds(const mm_value *body) {
  for (const mm_value *v = body->first; v; v = v->next) {
    const field *f = v->type == MM_VALUE_NULL ? NULL : find(v->key);
    if (f && mm_value_key_is(v, f->name) && strchr(f->fate, 'H')) return true;
  }
  return false;
}

/* ---- What asks for nothing ---- */

static bool is_bool(const mm_value *v, bool truth) { return v->type == MM_VALUE_BOOL && v->truth == truth; }

static bool is_empty(const mm_value *v) {
  switch (v->type) {
    case MM_VALUE_STRING: return !v->n;
    case MM_VALUE_ARRAY:
    case MM_VALUE_OBJECT: return !v->count;
    default: return false;
  }
}

static bool is_word(const mm_value *v, const char *words) {
  for (size_t n; *words; words += n + (words[n] == ' ')) {
    n = strcspn(words, " ");
    if (v->type == MM_VALUE_STRING && v->n == n && memcmp(v->text, words, n) == 0) return true;
  }
  return false;
}

static bool is_as_many(const mm_value *v, const mm_value *n) {
  int64_t own, most = 1;
  return mm_value_int(v, &own) && (!n || mm_value_int(n, &most)) && own == most;
}

/* True if all items of a list are this string (`same`), or none is (not `same`). */
static bool is_list(const mm_value *v, const char *string, bool same) {
  if (v->type != MM_VALUE_ARRAY) return false;
  for (const mm_value *i = v->first; i; i = i->next)
    if (mm_value_is(i, string) != same) return false;
  return true;
}

static bool is_enabled(const mm_value *v) {
  const mm_value *type = mm_value_get(v, "type");
  return is_bool(v, true) || (v->type == MM_VALUE_OBJECT && type && type->type == MM_VALUE_STRING && !mm_value_is(type, "disabled"));
}

static bool shows_no_tools(const mm_value *body) {
  const mm_value *choice = mm_value_get(body, "tool_choice"), *tools = mm_value_get(body, "tools");
  return !tools || is_empty(tools) || mm_value_is(choice, "none") || mm_value_is(mm_value_get(choice, "type"), "none");
}

/* Penalties of the request as they are by default. */
static bool penalises_nothing(const mm_value *body) {
  static const struct {
    const char *name;
    double other; /* than 0 that asks for nothing */
  } penalties[] = {{"repetition_penalty", 1}, {"repeat_penalty", 1}, {"presence_penalty", 0}, {"frequency_penalty", 0}};
  for (size_t i = 0; i < sizeof penalties / sizeof *penalties; i++) {
    const mm_value *v = mm_value_get(body, penalties[i].name);
    const double x = v && v->type == MM_VALUE_NUMBER ? mm_value_real(v) : 0;
    if (v && (v->type != MM_VALUE_NUMBER || (x != 0 && x != penalties[i].other))) return false;
  }
  return true;
}

static bool is_neutral(const mm_value *body, const mm_value *v, const field *f) {
  const double number = v->type == MM_VALUE_NUMBER ? mm_value_real(v) : 0;
  switch (f->kind) {
    case NOTHING_NULL: return false;
    case NOTHING_ZERO: return v->type == MM_VALUE_NUMBER && number == 0;
    case NOTHING_ONE: return number == 1;
    case NOTHING_NEGATIVE: return number < 0;
    case NOTHING_NOT_POSITIVE: return v->type == MM_VALUE_NUMBER && number <= 0;
    case NOTHING_N: return is_as_many(v, mm_value_get(body, "n"));
    case NOTHING_FALSE: return is_bool(v, false);
    case NOTHING_TRUE: return is_bool(v, true);
    case NOTHING_EMPTY: return is_empty(v);
    case NOTHING_WORDS: return is_word(v, f->words);
    case NOTHING_CALL: return mm_value_is(v, "auto") || (mm_value_is(v, "none") && shows_no_tools(body));
    case NOTHING_TEXT: return mm_value_is(mm_value_get(v, "type"), "text");
    case NOTHING_PLAIN: return is_list(v, "text", true);
    case NOTHING_ENABLED: return is_enabled(v);
    case NOTHING_WINDOW: return v->type == MM_VALUE_NUMBER && (number == 0 || penalises_nothing(body));
    case NOTHING_LOGPROBS: return is_list(v, "message.output_text.logprobs", false);
  }
  return false;
}

const mm_value *mm_field_refused(const mm_value *body, mm_field_api api, const char **instead) {
  for (const mm_value *v = body->first; v; v = v->next) {
    const field *f = v->type == MM_VALUE_NULL ? NULL : find(v->key);
    if (!f || !mm_value_key_is(v, f->name) || f->fate[api] != 'R' || is_neutral(body, v, f)) continue;
    *instead = f->instead;
    return v;
  }
  return NULL;
}
