/* Requests about the server itself: health, metrics, models. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/serve/apis.h"
#include "runtime/serve/page.h"

static void send_json(mm_exchange *x, int status, mm_text *t) {
  mm_exchange_reply(x, t->failed ? 503 : status, "application/json", t->failed ? "{}" : t->p, t->failed ? 2 : t->n);
  free(t->p);
}

static const char *state_word(const mm_server *s) {
  static const char *const word[] = {"loading", "ready", "draining"};
  return word[s->state];
}

/* The process answers. */
static void health(mm_server *s, mm_exchange *x) {
  mm_text t = {0};
  mm_text_printf(&t, "{\"status\":\"%s\",\"version\":\"%s\"}", state_word(s), MM_VERSION);
  send_json(x, 200, &t);
}

/* Requests will be served: what a load balancer asks. */
static void ready(mm_server *s, mm_exchange *x) {
  mm_text t = {0};
  const mm_read_stats read = mm_read_log_stats(s->reads);
  mm_text_printf(&t, "{\"status\":\"%s\",\"stage\":\"%s\",\"seconds\":%.3f,\"bytes_read\":%llu,\"bytes_to_read\":%llu}", state_word(s),
                 s->stage, mm_now() - s->started, (unsigned long long)mm_read_bytes(&read), (unsigned long long)read.wanted);
  if (s->state != MM_SERVER_READY) mm_exchange_set(x, "Retry-After", "1");
  send_json(x, s->state == MM_SERVER_READY ? 200 : 503, &t);
}

/* Prompts that other servers compute for this one, and this one for others. */
static void put_transfer(mm_text *t, const mm_transfer_stats *s) {
  mm_metrics_value(t, "prefill_fetched_total", "counter", "Prompts that the server of --prefill-from computed.", (double)s->fetched);
  mm_metrics_value(t, "prefill_fallbacks_total", "counter", "Prompts computed here because that server could not.", (double)s->fallbacks);
  mm_metrics_value(t, "prefill_fetching", "gauge", "Prompts being computed there.", (double)s->running);
  mm_metrics_value(t, "prefill_pages_in_total", "counter", "Pages received.", (double)s->pages_in);
  mm_metrics_value(t, "prefill_bytes_in_total", "counter", "Bytes of pages and lightning states received.", (double)s->bytes_in);
  mm_metrics_value(t, "prefill_wait_seconds_total", "counter", "Seconds from asking for a prompt to its end.", s->wait_seconds);
  mm_metrics_value(t, "prefill_sent_total", "counter", "Prompts computed for servers with --prefill-from.", (double)s->sent);
  mm_metrics_value(t, "prefill_dropped_total", "counter", "Prompts of such servers given up.", (double)s->dropped);
  mm_metrics_value(t, "prefill_sending", "gauge", "Prompts of such servers in the queue or being computed.", (double)s->sending);
  mm_metrics_value(t, "prefill_pages_out_total", "counter", "Pages sent.", (double)s->pages_out);
  mm_metrics_value(t, "prefill_bytes_out_total", "counter", "Bytes of pages and lightning states sent.", (double)s->bytes_out);
}

static void put_scheduler(mm_text *t, mm_scheduler *scheduler) {
  mm_scheduler_stats s;
  mm_scheduler_stats_read(scheduler, &s);
  mm_metrics_value(t, "requests_total", "counter", "Requests that the scheduler accepted; one with n choices counts n times.",
                   (double)s.requests);
  mm_metrics_value(t, "requests_refused_total", "counter", "Choices refused because the queue was full.", (double)s.refused);
  mm_metrics_value(t, "requests_waiting", "gauge", "Choices in the queue.", s.waiting);
  mm_metrics_value(t, "requests_running", "gauge", "Choices being generated.", s.running);
  mm_metrics_value(t, "requests_preempted_total", "counter", "Preemptions of running requests.", (double)s.preempted);
  mm_metrics_value(t, "prompt_tokens_total", "counter", "Tokens of prompts.", (double)s.prompt_tokens);
  mm_metrics_value(t, "cached_tokens_total", "counter", "Tokens of prompts taken from the prefix cache.", (double)s.cached_tokens);
  mm_metrics_value(t, "reply_tokens_total", "counter", "Tokens generated.", (double)s.reply_tokens);
  mm_metrics_value(t, "steps_total", "counter", "Steps of the engine.", (double)s.steps);
  mm_metrics_value(t, "step_requests_total", "counter", "Choices that a step has tokens of, added up over the steps.", (double)s.busy);
  mm_metrics_value(t, "step_seconds_total", "counter", "Seconds in the engine.", s.step_seconds);
  double bound[MM_STEP_BUCKETS];
  for (int i = 0; i < MM_STEP_BUCKETS; i++) bound[i] = 1u << i;
  mm_metrics_histogram(t, "step_tokens", "Tokens that a step generated, and of the prompts whose first token is among them.", bound,
                       s.step_tokens.count, MM_STEP_BUCKETS, (double)s.step_tokens.sum);
  mm_metrics_value(t, "slots", "gauge", "Sequences that can run at a time.", s.slots);
  mm_metrics_value(t, "pages", "gauge", "Pages of the KV cache.", s.pages);
  mm_metrics_value(t, "pages_free", "gauge", "Pages that nobody holds.", s.pages_free);
  mm_metrics_value(t, "kv_cache_usage", "gauge", "Share of the pages that requests hold.", mm_scheduler_cache_usage(&s));
  mm_metrics_value(t, "pages_cached", "gauge", "Pages that the prefix cache holds.", s.pages_cached);
  mm_metrics_value(t, "drafts_total", "counter", "Steps of a choice with proposed tokens.", (double)s.drafts);
  mm_metrics_value(t, "drafted_tokens_total", "counter", "Tokens proposed by prompt lookup and by the checkpoint's draft.",
                   (double)s.drafted);
  mm_metrics_value(t, "draft_model_tokens_total", "counter", "Tokens proposed by the checkpoint's draft.", (double)s.learned);
  mm_metrics_value(t, "accepted_tokens_total", "counter", "Proposed tokens that were accepted.", (double)s.accepted);
  mm_metrics_value(t, "cache_state_bytes", "gauge", "Bytes of lightning states in the prefix cache.", (double)s.cache_bytes);
  const double page = (double)s.page_bytes;
  mm_metrics_value(t, "offload_bytes_max", "gauge", "Bytes of host memory for pages of the prefix cache.", page * s.places);
  mm_metrics_value(t, "offload_bytes", "gauge", "Host memory in use for offloaded pages, in bytes.", page * s.places_used);
  mm_metrics_value(t, "offload_pages", "gauge", "Pages of the prefix cache in host memory.", s.places_used);
  mm_metrics_value(t, "offload_out_bytes_total", "counter", "Bytes of pages copied to host memory.", page * (double)s.pages_out);
  mm_metrics_value(t, "offload_in_bytes_total", "counter", "Bytes of pages copied back.", page * (double)s.pages_in);
  mm_metrics_value(t, "offload_hits_total", "counter", "Choices for which pages were copied back.", (double)s.fetched);
  mm_metrics_value(t, "offload_disk_bytes_max", "gauge", "Bytes of disk for pages of the prefix cache.", page * s.blocks);
  mm_metrics_value(t, "offload_disk_bytes", "gauge", "Disk in use for offloaded pages, in bytes.", page * s.blocks_used);
  mm_metrics_value(t, "offload_disk_written_bytes_total", "counter", "Bytes of pages written to disk.", page * (double)s.pages_written);
  mm_metrics_value(t, "offload_disk_read_bytes_total", "counter", "Bytes of pages read back.", page * (double)s.pages_read);
  mm_metrics_value(t, "offload_disk_failed_total", "counter", "Pages that could not be written or read.", (double)s.disk_failed);
  put_transfer(t, &s.transfer);
}

/* Where attention has groups of ranks: the balance between them. */
static void put_groups(mm_text *t, mm_scheduler *scheduler) {
  const uint32_t groups = mm_scheduler_groups(scheduler);
  uint64_t *tokens = groups > 1 ? calloc(groups, sizeof *tokens) : NULL;
  if (groups == 1) return;
  t->failed |= !tokens;
  mm_text_put(t,
              "# HELP minimax_group_tokens Tokens of the choices that run in a group of ranks with all of attention.\n"
              "# TYPE minimax_group_tokens gauge\n");
  if (tokens) mm_scheduler_group_tokens(scheduler, tokens);
  for (uint32_t g = 0; tokens && g < groups; g++)
    mm_text_printf(t, "minimax_group_tokens{group=\"%u\"} %llu\n", g, (unsigned long long)tokens[g]);
  free(tokens);
}

static void put_cache(mm_text *t, const mm_server *s) {
  const mm_engine_cache c = mm_engine_cache_of(s->engine);
  mm_metrics_value(t, "kv_cache_tokens", "gauge", "Tokens that the KV cache holds.", (double)c.tokens);
  mm_metrics_value(t, "kv_cache_bytes", "gauge", "Bytes of the KV cache on the rank that keeps the most.", (double)c.bytes);
}

/* All ranks' devices: GPUs, or this machine's memory. */
static void put_memory(mm_text *t, const mm_server *s) {
  mm_engine_use use;
  mm_text total = {0}, free_bytes = {0}, used = {0};
  for (uint32_t r = 0; mm_engine_use_of(s->engine, r, &use); r++) {
    mm_text_printf(&total, "minimax_device_memory_total_bytes{rank=\"%u\"} %llu\n", r, (unsigned long long)use.total);
    mm_text_printf(&free_bytes, "minimax_device_memory_free_at_start_bytes{rank=\"%u\"} %llu\n", r, (unsigned long long)use.free);
    const uint64_t bytes[] = {use.weights, use.buffers, use.states, use.caches};
    static const char *const by[] = {"weights", "buffers", "states", "kv_cache"};
    for (size_t i = 0; i < sizeof by / sizeof *by; i++)
      mm_text_printf(&used, "minimax_device_memory_used_bytes{rank=\"%u\",by=\"%s\"} %llu\n", r, by[i], (unsigned long long)bytes[i]);
  }
  const struct {
    const char *name, *help;
    mm_text *values;
  } metric[] = {{"total", "Memory of a rank's device.", &total},
                {"free_at_start", "Free memory of the rank's device before loading.", &free_bytes},
                {"used", "Memory that the rank uses on its device, by purpose.", &used}};
  for (size_t i = 0; i < sizeof metric / sizeof *metric; i++) {
    mm_text *v = metric[i].values;
    if (v->n)
      mm_text_printf(t, "# HELP minimax_device_memory_%s_bytes %s\n# TYPE minimax_device_memory_%s_bytes gauge\n", metric[i].name,
                     metric[i].help, metric[i].name);
    mm_text_add(t, v->p, v->n);
    t->failed |= v->failed;
    free(v->p);
  }
}

static void put_experts(mm_text *t, const mm_server *s) {
  const mm_model *m = mm_engine_model(s->engine);
  uint64_t *load = calloc((size_t)m->layers * m->experts, sizeof *load), all = 0;
  if (!load) {
    t->failed = true;
    return;
  }
  mm_scheduler_expert_load(s->scheduler, load);
  for (size_t i = 0; i < (size_t)m->layers * m->experts; i++) all += load[i];
  mm_metrics_value(t, "expert_rows_total", "counter", "Tokens that experts were chosen for, of all layers.", (double)all);
  mm_text_put(t,
              "# HELP minimax_expert_peak Tokens of a layer's busiest expert, over the mean of its experts.\n"
              "# TYPE minimax_expert_peak gauge\n");
  for (uint32_t l = 0; l < m->layers; l++) {
    uint64_t sum = 0, most = 0;
    for (uint32_t e = 0; e < m->experts; e++) {
      const uint64_t n = load[(size_t)l * m->experts + e];
      sum += n;
      most = mm_max(most, n);
    }
    mm_text_printf(t, "minimax_expert_peak{layer=\"%u\"} %.6g\n", l, sum ? (double)most * m->experts / (double)sum : 0);
  }
  free(load);
}

/* Bytes of the process that are in memory. */
static double resident(void) {
  unsigned long long pages = 0;
  FILE *f = fopen("/proc/self/statm", "re");
  if (f && fscanf(f, "%*u %llu", &pages) != 1) pages = 0;
  if (f) fclose(f);
  return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

static void put_replies(mm_text *t, const mm_server *s) {
  mm_text_put(t, "# HELP minimax_http_replies_total Replies by their status.\n# TYPE minimax_http_replies_total counter\n");
  for (int status = 100; status < 600; status++)
    if (mm_http_replies(s->http, status))
      mm_text_printf(t, "minimax_http_replies_total{status=\"%d\"} %llu\n", status, (unsigned long long)mm_http_replies(s->http, status));
}

static void put_build(mm_text *t) {
  mm_text_printf(t,
                 "# HELP minimax_build_info Always 1; the labels say which build serves.\n# TYPE minimax_build_info gauge\n"
                 "minimax_build_info{version=\"%s\",build=\"%s\"} 1\n",
                 MM_VERSION, mm_version());
}

static void put_forms(mm_text *t, mm_form_cache *forms) {
  const mm_form_cache_stats s = mm_form_cache_read(forms);
  mm_metrics_value(t, "form_cache_hits_total", "counter", "Schemas, grammars and tools of requests that were compiled before.",
                   (double)s.hits);
  mm_metrics_value(t, "form_cache_misses_total", "counter", "Schemas, grammars and tools that had to be compiled, or were refused.",
                   (double)s.misses);
  mm_metrics_value(t, "form_cache_forms", "gauge", "Compiled forms in memory.", (double)s.forms);
  mm_metrics_value(t, "form_cache_bytes", "gauge", "Memory of compiled forms, in bytes.", (double)s.bytes);
  mm_metrics_value(t, "form_cache_bytes_max", "gauge", "Bytes above which those that no request holds are dropped.", (double)s.bytes_max);
}

/* The metrics of llama.cpp's server, which have no labels. Its seconds are those of prompts and of tokens behind the first. */
static void put_llama(mm_text *t, const mm_server *s) {
  mm_scheduler_stats n = {0};
  if (s->scheduler) mm_scheduler_stats_read(s->scheduler, &n);
  const double prompt_s = s->metrics.prompt_seconds, reply_s = s->metrics.between_tokens.sum, reply = (double)n.reply_tokens,
               prompt = (double)(n.prompt_tokens - n.cached_tokens);
  const struct {
    const char *name, *type, *help;
    double value;
  } v[] = {
      {"prompt_tokens_total", "counter", "Tokens of prompts that were computed.", prompt},
      {"prompt_tokens_cached_total", "counter", "Tokens of prompts taken from the prefix cache.", (double)n.cached_tokens},
      {"prompt_seconds_total", "counter", "Seconds from the slots of choices to their first tokens.", prompt_s},
      {"tokens_predicted_total", "counter", "Tokens generated.", reply},
      {"tokens_predicted_seconds_total", "counter", "Seconds from tokens to the next ones.", reply_s},
      {"n_decode_total", "counter", "Steps of the engine.", (double)n.steps},
      {"n_tokens_max", "counter", "Tokens of a prompt and its reply together, the most so far.", (double)s->metrics.longest},
      {"spec_decode_num_draft_tokens_total", "counter", "Tokens proposed.", (double)n.drafted},
      {"spec_decode_num_accepted_tokens_total", "counter", "Proposed tokens that were accepted.", (double)n.accepted},
      {"spec_decode_num_drafts_total", "counter", "Steps of a choice with proposed tokens.", (double)n.drafts},
      {"prompt_tokens_seconds", "gauge", "Tokens of prompts a second.", prompt_s > 0 ? prompt / prompt_s : 0},
      {"predicted_tokens_seconds", "gauge", "Tokens generated a second.", reply_s > 0 ? reply / reply_s : 0},
      {"requests_processing", "gauge", "Choices being generated.", n.running},
      {"requests_deferred", "gauge", "Choices in the queue.", n.waiting},
      {"n_busy_slots_per_decode", "gauge", "Choices that a step has tokens of, the mean.", n.steps ? (double)n.busy / (double)n.steps : 0},
  };
  for (size_t i = 0; i < sizeof v / sizeof *v; i++)
    mm_text_printf(t, "# HELP llamacpp:%s %s\n# TYPE llamacpp:%s %s\nllamacpp:%s %.17g\n", v[i].name, v[i].help, v[i].name, v[i].type,
                   v[i].name, v[i].value);
}

/* Metrics of vLLM that have labels of their own, or two of whose names are one here. */
static void put_vllm(mm_text *t, const mm_server *s) {
  static const char *const finish[MM_FINISHES] = {"stop", "length", "abort", "deadline", "error"};
  mm_scheduler_stats n = {0};
  if (s->scheduler) mm_scheduler_stats_read(s->scheduler, &n);
  mm_text_printf(t,
                 "# HELP vllm:num_requests_waiting_by_reason Choices in the queue.\n# TYPE vllm:num_requests_waiting_by_reason gauge\n"
                 "vllm:num_requests_waiting_by_reason{reason=\"capacity\"} %u\nvllm:num_requests_waiting_by_reason{reason=\"deferred\"} 0\n"
                 "# HELP vllm:prefix_cache_queries_total Tokens of prompts.\n# TYPE vllm:prefix_cache_queries_total counter\n"
                 "vllm:prefix_cache_queries_total %llu\n"
                 "# HELP vllm:admission_rejections_total Choices refused because the queue was full.\n"
                 "# TYPE vllm:admission_rejections_total counter\nvllm:admission_rejections_total{reason=\"queue_full\"} %llu\n"
                 "# HELP vllm:request_success_total Choices by how they ended.\n# TYPE vllm:request_success_total counter\n",
                 n.waiting, (unsigned long long)n.prompt_tokens, (unsigned long long)n.refused);
  for (int i = 0; i < MM_FINISHES; i++)
    mm_text_printf(t, "vllm:request_success_total{finished_reason=\"%s\"} %llu\n", finish[i], (unsigned long long)s->metrics.finished[i]);
  if (!s->scheduler) return;
  const mm_engine_cache c = mm_engine_cache_of(s->engine);
  mm_text_printf(
      t,
      "# HELP vllm:cache_config_info Always 1; the labels describe the KV cache.\n# TYPE vllm:cache_config_info gauge\n"
      "vllm:cache_config_info{block_size=\"%d\",num_gpu_blocks=\"%u\",kv_cache_size_tokens=\"%llu\",kv_cache_max_concurrency=\"%.2f\"} 1\n",
      MM_PAGE, n.pages, (unsigned long long)c.tokens, (double)c.tokens / s->positions);
}

/* As llama.cpp's server answers where it was not started with --metrics. */
static void refuse_metrics(mm_exchange *x) {
  mm_text t = {0};
  mm_text_put(&t,
              "{\"error\":{\"message\":\"/metrics is off (--metric-names none)\",\"type\":\"not_supported_error\",\"param\":null,"
              "\"code\":\"not_supported\"}}");
  send_json(x, 501, &t);
}

static void metrics(mm_server *s, mm_exchange *x) {
  mm_text t = {0}, out = {0};
  if (s->metric_names == MM_METRICS_NONE) {
    refuse_metrics(x);
    return;
  }
  put_build(&t);
  mm_metrics_value(&t, "ready", "gauge", "1 when requests are served.", s->state == MM_SERVER_READY);
  mm_metrics_value(&t, "connections", "gauge", "Open connections.", mm_http_connections(s->http));
  mm_metrics_value(&t, "calls", "gauge", "API requests being answered.", s->calls);
  mm_metrics_value(&t, "resident_bytes", "gauge", "Memory of the process.", resident());
  mm_metrics_write(&s->metrics, &t);
  if (s->scheduler) put_scheduler(&t, s->scheduler), put_groups(&t, s->scheduler), put_cache(&t, s), put_memory(&t, s);
  if (s->scheduler) put_experts(&t, s);
  put_forms(&t, s->forms);
  put_replies(&t, s);
  if (!t.failed) mm_metrics_label(t.p, s->name[0], s->metric_names == MM_METRICS_VLLM, &out);
  if (s->metric_names == MM_METRICS_VLLM) {
    mm_text other = {0};
    put_vllm(&other, s);
    if (!other.failed) mm_metrics_label(other.p, s->name[0], false, &out);
    out.failed |= other.failed;
    free(other.p);
  }
  if (s->metric_names == MM_METRICS_LLAMA) {
    put_llama(&out, s);
    mm_exchange_set(x, "Process-Start-Time-Unix", MM_FORMATTED(24, "%lld", (long long)s->created));
  }
  const bool failed = t.failed || out.failed;
  mm_exchange_reply(x, failed ? 503 : 200, "text/plain; version=0.0.4; charset=utf-8", failed ? "" : out.p, failed ? 0 : out.n);
  MM_FREE(t.p, out.p);
}

/* Also what the defaults of requests are. */
static void put_model(const mm_server *s, const char *name, mm_text *t) {
  const mm_sampling *d = &s->defaults;
  mm_text_put(t, "{\"id\":");
  mm_text_quote_string(t, name);
  mm_text_printf(t, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"minimax\",\"parent\":null,\"root\":", (long long)s->created);
  mm_text_quote_string(t, s->name[0]);
  if (s->compat == MM_COMPAT_LLAMA) mm_text_printf(t, ",\"status\":{\"value\":\"%s\"}", s->state == MM_SERVER_READY ? "loaded" : "loading");
  if (s->state == MM_SERVER_READY) {
    mm_text_printf(t, ",\"max_model_len\":%u,\"defaults\":{\"temperature\":", s->positions);
    mm_text_real(t, d->temperature);
    mm_text_put(t, ",\"top_p\":");
    mm_text_real(t, d->top_p);
    mm_text_printf(t, ",\"top_k\":%u}", d->top_k);
  }
  mm_text_put(t, "}");
}

static void models(mm_server *s, mm_exchange *x) {
  mm_text t = {0};
  mm_text_put(&t, "{\"object\":\"list\",\"data\":[");
  for (size_t i = 0; i < s->names; i++) {
    if (i) mm_text_put(&t, ",");
    put_model(s, s->name[i], &t);
  }
  if (s->compat == MM_COMPAT_LLAMA) {
    mm_text_put(&t, "],\"models\":[{\"name\":");
    mm_text_quote_string(&t, s->name[0]);
    mm_text_put(&t, ",\"model\":");
    mm_text_quote_string(&t, s->name[0]);
    mm_text_put(&t, ",\"capabilities\":[\"completion\"]}");
  }
  mm_text_put(&t, "]}");
  send_json(x, 200, &t);
}

/* As vLLM and Ollama answer. */
static void version(mm_server *s, mm_exchange *x) {
  mm_text t = {0};
  (void)s;
  mm_text_printf(&t, "{\"version\":\"%s\"}", MM_VERSION);
  send_json(x, 200, &t);
}

/* The names of llama.cpp's server, as far as they mean something here. */
static void props(mm_server *s, mm_exchange *x) {
  mm_text t = {0};
  mm_scheduler_stats stats = {0};
  if (s->scheduler) mm_scheduler_stats_read(s->scheduler, &stats);
  mm_text_put(&t, "{\"model_alias\":");
  mm_text_quote_string(&t, s->name[0]);
  mm_text_put(&t, ",\"build_info\":");
  mm_text_quote_string(&t, mm_version());
  mm_text_printf(&t, ",\"total_slots\":%u,\"modalities\":{\"vision\":false,\"audio\":false},\"default_generation_settings\":{\"n_ctx\":%u",
                 stats.slots, s->positions);
  mm_text_put(&t, ",\"params\":{\"temperature\":");
  mm_text_real(&t, s->defaults.temperature);
  mm_text_put(&t, ",\"top_p\":");
  mm_text_real(&t, s->defaults.top_p);
  mm_text_printf(&t, ",\"top_k\":%u}}}", s->defaults.top_k);
  send_json(x, s->state == MM_SERVER_READY ? 200 : 503, &t);
}

/* vLLM's path, by which lm-evaluation-harness sees that it can tokenise here. No token is put before a prompt or behind it. */
static void tokenizer_info(mm_server *s, mm_exchange *x) {
  mm_text t = {0};
  (void)s;
  mm_text_put(&t, "{\"tokenizer_class\":\"minimax\",\"bos_token\":null,\"eos_token\":null,\"pad_token\":null,\"chat_template\":null}");
  send_json(x, 200, &t);
}

/* What minimax-convert --place reads: rows that chose each expert of each layer since the start. */
static void expert_load(mm_server *s, mm_exchange *x) {
  mm_text t = {0};
  mm_digest digest;
  const mm_model *m = s->engine ? mm_engine_model(s->engine) : NULL;
  uint64_t *load = m && s->scheduler ? calloc((size_t)m->layers * m->experts, sizeof *load) : NULL;
  if (!load || !mm_model_digest(m, &digest, MM_IGNORED)) {
    free(load);
    mm_text_put(&t, "{\"error\":{\"message\":\"no load is counted yet\",\"type\":\"server_error\",\"param\":null,\"code\":null}}");
    send_json(x, 503, &t);
    return;
  }
  mm_scheduler_expert_load(s->scheduler, load);
  mm_text_printf(&t, "{\"format\":\"%s\",\"version\":1,\"model\":\"%s\",\"architecture\":", MM_LOAD_FORMAT, mm_digest_hex(&digest).text);
  mm_text_quote_string(&t, m->architecture);
  mm_text_put(&t, ",\"load\":[");
  for (size_t i = 0; i < (size_t)m->layers * m->experts; i++)
    mm_text_printf(&t, "%s%llu%s", i % m->experts ? "," : i ? ",[" : "[", (unsigned long long)load[i], (i + 1) % m->experts ? "" : "]");
  mm_text_put(&t, "]}");
  free(load);
  send_json(x, 200, &t);
}

#define VERSION "/v1"
#define MODEL   "/v1/models/"

bool mm_path_is_short(const char *path, const char *whole) {
  return strncmp(whole, VERSION "/", strlen(VERSION "/")) == 0 && strcmp(whole + strlen(VERSION), path) == 0;
}

/* The model that a path names, with /v1 before it or without; NULL: it is another path. */
static const char *model_of(const char *path) {
  const char *shorter = &MODEL[strlen(VERSION)];
  if (strncmp(path, MODEL, strlen(MODEL)) == 0) return path + strlen(MODEL);
  return strncmp(path, shorter, strlen(shorter)) == 0 ? path + strlen(shorter) : NULL;
}

/* True if the path equals this name; a byte of the path may be written as % and two hexadecimal digits. */
static bool path_is(const char *path, const char *name) {
  for (; *path && *name; name++) {
    const int high = *path == '%' ? mm_hex_digit(path[1]) : -1, low = high < 0 ? -1 : mm_hex_digit(path[2]);
    if ((uint8_t)*name != (low < 0 ? (uint8_t)*path : 16 * high + low)) return false;
    path += low < 0 ? 1 : 3;
  }
  return !*path && !*name;
}

static void model(mm_server *s, mm_exchange *x) {
  mm_text t = {0};
  for (size_t i = 0; i < s->names; i++) {
    if (!path_is(model_of(mm_exchange_path(x)), s->name[i])) continue;
    put_model(s, s->name[i], &t);
    send_json(x, 200, &t);
    return;
  }
  mm_text_put(
      &t, "{\"error\":{\"message\":\"there is no such model\",\"type\":\"not_found_error\",\"param\":\"model\",\"code\":\"not_found\"}}");
  send_json(x, 404, &t);
}

static void page(mm_server *s, mm_exchange *x) {
  size_t n;
  const char *html = mm_page_html(&n);
  (void)s;
  mm_exchange_set(x, "Content-Security-Policy",
                  "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
                  "form-action 'none'; frame-ancestors 'none'");
  mm_exchange_reply(x, 200, "text/html; charset=utf-8", html, n);
}

static const struct {
  const char *path, *what;
  mm_page *page;
  bool keyed;
} pages[] = {{"/", "a page to chat with the model and watch the server", page, false},
             {"/health", "the process answers", health, false},
             {"/ready", "requests are served, or what is being loaded", ready, false},
             {"/metrics", "Prometheus", metrics, false},
             {"/expert_load", "how often each expert was chosen, as minimax-convert --place reads it", expert_load, true},
             {"/v1/models", "the model's names and defaults", models, true},
             {"/version", "the version", version, false},
             {"/props", "slots, context length and defaults", props, true},
             {"/tokenizer_info", "tokens are those of /tokenize, and none is added", tokenizer_info, true},
             {"/openapi.json", "this document", mm_openapi_page, false}};

const char *mm_page_path(size_t i, const char **what) {
  if (i >= sizeof pages / sizeof *pages) return NULL;
  *what = pages[i].what;
  return pages[i].path;
}

mm_page *mm_page_find(const char *path, bool *keyed) {
  for (size_t i = 0; i < sizeof pages / sizeof *pages; i++)
    if (strcmp(pages[i].path, path) == 0 || mm_path_is_short(path, pages[i].path)) return *keyed = pages[i].keyed, pages[i].page;
  return model_of(path) ? (*keyed = true, model) : NULL;
}
