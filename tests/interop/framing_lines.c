/* The server's reader of requests from the command line. A line of stdin is the bytes of a connection in hexadecimal and the places at
 * which they are divided, in ascending order: "474554202f… 5 17". A line of stdout is what was read, all texts in hexadecimal:
 *
 *   {"requests": [{"method": H, "path": H, "minor": N, "keep": B, "expects": B, "fields": [[H, H], …], "body": H, "end": BYTES}, …],
 *    "refused": STATUS or 0, "why": S or null, "method": H, "begun": B}
 *
 * As the server does, it ends at a request that ends the connection; method, begun: of a last request that is not whole. Heads have at most
 * 64 KiB, bodies 4096 bytes. */
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/framing.h"

static void put_hex(mm_text *t, const char *bytes, size_t n) {
  mm_text_put(t, "\"");
  for (size_t i = 0; i < n; i++) mm_text_printf(t, "%02x", (unsigned)(uint8_t)bytes[i]);
  mm_text_put(t, "\"");
}

static void put_request(mm_text *t, const mm_framing *f, size_t end, bool first, bool expects) {
  mm_text_put(t, first ? "{\"method\":" : ",{\"method\":");
  put_hex(t, f->method, strlen(f->method));
  mm_text_put(t, ",\"path\":");
  put_hex(t, f->path, strlen(f->path));
  mm_text_printf(t, ",\"minor\":%d,\"keep\":%s,\"expects\":%s,\"fields\":[", f->minor, f->keep ? "true" : "false",
                 expects ? "true" : "false");
  for (size_t i = 0; i < f->fields; i++) {
    mm_text_put(t, i ? ",[" : "[");
    put_hex(t, f->field[i].name, strlen(f->field[i].name));
    mm_text_put(t, ",");
    put_hex(t, f->field[i].value, strlen(f->field[i].value));
    mm_text_put(t, "]");
  }
  mm_text_put(t, "],\"body\":");
  put_hex(t, f->body.p ? f->body.p : "", f->body.n);
  mm_text_printf(t, ",\"end\":%zu}", end);
}

/* Reads the requests in bytes[0 … n), divided where the numbers in `cuts` say. */
static void read_all(const char *bytes, size_t n, char *cuts, mm_text *out) {
  mm_framing f = {.head_max = 64 << 10, .body_max = 4096};
  size_t at = 0, requests = 0;
  bool keep = true;
  mm_text_put(out, "{\"requests\":[");
  while (at < n && keep && f.state != MM_FRAMING_REFUSED) {
    size_t to = *cuts ? strtoul(cuts, &cuts, 10) : n;
    if (to > n) to = n;
    while (at < to && keep && f.state != MM_FRAMING_REFUSED) {
      char *piece = malloc(to - at); /* of its own size: a reader beyond it is seen by sanitizers */
      if (!piece) exit(8);
      memcpy(piece, bytes + at, to - at);
      at += mm_framing_read(&f, piece, to - at);
      free(piece);
      if (f.state != MM_FRAMING_DONE) continue;
      put_request(out, &f, at, requests++ == 0, f.expects);
      keep = f.keep;
      mm_framing_next(&f);
    }
  }
  mm_text_printf(out, "],\"refused\":%d,\"why\":", f.status);
  mm_text_quote_or_null(out, f.reason);
  const bool begun = f.state == MM_FRAMING_BODY || (f.state == MM_FRAMING_HEAD && (f.request.n || f.cr));
  mm_text_put(out, ",\"method\":");
  put_hex(out, f.method ? f.method : "", f.method ? strlen(f.method) : 0);
  mm_text_printf(out, ",\"begun\":%s}", begun ? "true" : "false");
  mm_framing_close(&f);
}

static int digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

int main(void) {
  char *line = NULL;
  size_t cap = 0;
  while (getline(&line, &cap, stdin) > 0) {
    mm_text out = {0};
    const size_t n = strspn(line, "0123456789abcdef") / 2;
    char *cuts = line + 2 * n;
    for (size_t i = 0; i < n; i++) line[i] = (char)(16 * digit(line[2 * i]) + digit(line[2 * i + 1]));
    cuts += strspn(cuts, " ");
    cuts[strcspn(cuts, "\n")] = 0;
    read_all(line, n, cuts, &out);
    if (out.failed) return 8;
    puts(out.p);
    free(out.p);
  }
  free(line);
  return fflush(stdout) ? 5 : 0;
}
