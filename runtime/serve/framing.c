/* The reader of requests. A head is kept as text, line by line, and understood when its blank line has come. */
#include "runtime/serve/framing.h"

#include <stdlib.h>
#include <string.h>

#define KEPT_MAX    ((size_t)64 << 10) /* bytes of a body's memory that the next request uses again */
#define SIZE_DIGITS 20                 /* of a chunk's size, zeros before it included */

enum { PART_LENGTH, PART_SIZE, PART_CHUNK, PART_CHUNK_END, PART_TRAILER }; /* of a body */

static const char too_large[] = "the body is larger than this server takes (--max-body)";

static bool refuse(mm_framing *f, int status, const char *reason) {
  f->state = MM_FRAMING_REFUSED;
  f->status = status;
  f->reason = reason;
  return false;
}

static bool refuse_memory(mm_framing *f) { return refuse(f, 503, "out of memory"); }

/* ---- Lines ---- */

/* Adds bytes to t up to the end of its line, CR LF, of which no byte is kept. True: the line is whole. *used: bytes taken. */
static bool take_line(mm_framing *f, mm_text *t, const char *bytes, size_t n, size_t *used) {
  size_t i = 0;
  bool whole = false;
  for (; i < n && !f->cr; i++) {
    const uint8_t c = (uint8_t)bytes[i];
    if (c == '\r')
      f->cr = true;
    else if (c == '\n')
      return refuse(f, 400, "a line ends with LF alone, expected CR LF");
    else if ((c < 0x20 && c != '\t') || c == 0x7f)
      return refuse(f, 400, "a control character in a line of the request");
  }
  mm_text_add(t, bytes, i - (i > 0 && f->cr));
  if (f->cr && i < n) {
    if (bytes[i++] != '\n') return refuse(f, 400, "a CR without LF");
    f->cr = false;
    whole = true;
  }
  *used = i;
  return t->failed ? refuse_memory(f) : whole;
}

static bool is_token(char c) {
  static const char other[] = "!#$%&'*+-.^_`|~";
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c && strchr(other, c));
}

static size_t token_length(const char *p) {
  size_t n = 0;
  while (is_token(p[n])) n++;
  return n;
}

static bool is_blank(char c) { return c == ' ' || c == '\t'; }

/* True if a comma-separated list of tokens, as in Connection, contains this one. */
static bool has_member(const char *list, const char *word) {
  const size_t n = strlen(word);
  for (const char *p = list; *p;) {
    const size_t length = strcspn(p, ",");
    size_t from = 0, to = length;
    while (from < to && is_blank(p[from])) from++;
    while (to > from && is_blank(p[to - 1])) to--;
    if (to - from == n && strncasecmp(p + from, word, n) == 0) return true;
    p += length + (p[length] == ',');
  }
  return false;
}

/* ---- The head ---- */

/* METHOD SP target SP HTTP/1.x */
static bool read_request_line(mm_framing *f, char *line) {
  char *p = line + token_length(line);
  if (p == line || *p != ' ') return refuse(f, 400, "the request line does not begin with a method and a space");
  *p++ = 0;
  f->method = line;
  char *target = p;
  while (*p > ' ' && *p <= '~') p++;
  if (p == target || *p != ' ') return refuse(f, 400, "the request line has no target of printable characters");
  *p++ = 0;
  f->path = target;
  f->target_at = (size_t)(target - line);
  if (strlen(p) != 8 || strncmp(p, "HTTP/", 5) != 0 || p[5] < '0' || p[5] > '9' || p[6] != '.' || p[7] < '0' || p[7] > '9')
    return refuse(f, 400, "the request line does not end with the version of HTTP");
  if (p[5] != '1') return refuse(f, 505, "the version is not one of HTTP/1");
  f->minor = p[7] != '0';
  return true;
}

static bool read_field(mm_framing *f, char *line, mm_http_field *field) {
  const size_t n = token_length(line);
  if (is_blank(*line)) return refuse(f, 400, "a header is continued on a second line");
  if (!n || line[n] != ':') return refuse(f, 400, "a header name is not a token followed by a colon");
  line[n] = 0;
  char *value = line + n + 1, *end = value + strlen(value);
  while (is_blank(*value)) value++;
  while (end > value && is_blank(end[-1])) *--end = 0;
  *field = (mm_http_field){line, value};
  return true;
}

/* A name or an address, and a port where there is one. */
static bool is_host(const char *p) {
  const bool bracket = *p == '[';
  const char *inner = bracket ? "0123456789abcdefABCDEF:." : "-._~!$&'()*+,;=%";
  if (bracket) p++;
  while ((*p && strchr(inner, *p)) || (!bracket && ((*p >= '0' && *p <= '9') || (*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z')))) p++;
  if (bracket && *p++ != ']') return false;
  if (*p == ':') p += 1 + strspn(p + 1, "0123456789");
  return !*p;
}

/* Decimal digits alone; UINT64_MAX where the number is too large for 64 bits. */
static bool read_length(const char *p, uint64_t *length) {
  if (!*p || p[strspn(p, "0123456789")]) return false;
  for (*length = 0; *p; p++) *length = *length > (UINT64_MAX - 9) / 10 ? UINT64_MAX : 10 * *length + (uint64_t)(*p - '0');
  return true;
}

/* RFC 9110, section 5.3: a field that is no list comes once. Host and Content-Length have rules of their own (read_meaning); of fields that
 * this server does not read nothing is known. */
static bool check_once(mm_framing *f, size_t at) {
  static const char *const twice[] = {"Authorization: found two, expected one",
                                      "x-api-key: found two, expected one",
                                      "Content-Type: found two, expected one",
                                      "Origin: found two, expected one",
                                      "Access-Control-Request-Method: found two, expected one",
                                      "Access-Control-Request-Private-Network: found two, expected one",
                                      "endpoint-load-metrics-format: found two, expected one"};
  const char *name = f->field[at].name;
  for (size_t i = 0; i < sizeof twice / sizeof *twice; i++) {
    const size_t n = strcspn(twice[i], ":");
    if (strlen(name) != n || strncasecmp(name, twice[i], n) != 0) continue;
    for (size_t k = 0; k < at; k++)
      if (strcasecmp(f->field[k].name, name) == 0) return refuse(f, 400, twice[i]);
  }
  return true;
}

/* Reads the fields that say where the request ends, and which host it is for. */
static bool read_meaning(mm_framing *f, const char **host) {
  const char *length = NULL, *coding = NULL;
  bool close = false, keep = false;
  for (size_t i = 0; i < f->fields; i++) {
    const mm_http_field *h = &f->field[i];
    if (!h->name || !h->value) return refuse(f, 400, "a field has no name or no value"); /* read_head sets both */
    if (!check_once(f, i)) return false;
    if (strcasecmp(h->name, "host") == 0) {
      if (*host) return refuse(f, 400, "Host: found two, expected one");
      if (!is_host(*host = h->value)) return refuse(f, 400, "Host: expected a name or an address, and a port");
    } else if (strcasecmp(h->name, "content-length") == 0) {
      if (!read_length(h->value, &f->left) || (length && strcmp(length, h->value) != 0))
        return refuse(f, 400, "Content-Length: expected one number");
      length = h->value;
    } else if (strcasecmp(h->name, "transfer-encoding") == 0) {
      if (coding || strcasecmp(h->value, "chunked") != 0) return refuse(f, 400, "Transfer-Encoding: only chunked is served, once");
      coding = h->value;
    } else if (strcasecmp(h->name, "connection") == 0) {
      close |= has_member(h->value, "close");
      keep |= has_member(h->value, "keep-alive");
    } else if (strcasecmp(h->name, "expect") == 0) {
      f->expects |= f->minor > 0 && has_member(h->value, "100-continue");
    }
  }
  f->keep = !close && (f->minor > 0 || keep);
  f->chunked = coding;
  if (f->minor > 0 && !*host) return refuse(f, 400, "there is no Host");
  if (coding && !f->minor) return refuse(f, 400, "Transfer-Encoding: HTTP/1.0 does not have it");
  if (coding && length) return refuse(f, 400, "there are both Content-Length and Transfer-Encoding");
  return true;
}

/* The path of a target: a path, a URI of this host, or * for OPTIONS. */
static bool read_target(mm_framing *f, const char *host) {
  char *target = f->request.p + f->target_at;
  char *path = target;
  if (strchr(target, '#')) return refuse(f, 400, "the target has a fragment");
  if (strcmp(target, "*") == 0 && strcmp(f->method, "OPTIONS") == 0) return true;
  if (strncasecmp(target, "http://", 7) == 0) {
    const char *authority = target + 7;
    const size_t n = strcspn(authority, "/?");
    if (!host || !n || strlen(host) != n || strncasecmp(authority, host, n) != 0)
      return refuse(f, 400, "the target is a URI of another host than Host");
    path += 7 + n;
    if (*path != '/') {
      f->path = "/";
      return true;
    }
  }
  if (path[0] != '/' || path[1] == '/') return refuse(f, 400, "the target is not a path that begins with one slash");
  path[strcspn(path, "?")] = 0;
  f->path = path;
  return true;
}

/* The blank line has come. */
static bool read_head(mm_framing *f) {
  const char *host = NULL;
  size_t lines = 0;
  for (size_t at = 0; at < f->head.n; at += strlen(f->head.p + at) + 1) lines++;
  if (lines && !(f->field = calloc(lines, sizeof *f->field))) return refuse_memory(f);
  for (char *line = f->head.p, *next; f->fields < lines; line = next) {
    next = line + strlen(line) + 1;
    if (!read_field(f, line, &f->field[f->fields])) return false;
    f->fields++;
  }
  if (!read_meaning(f, &host) || !read_target(f, host)) return false;
  if (f->left > f->body_max) return refuse(f, 413, too_large);
  f->part = f->chunked ? PART_SIZE : PART_LENGTH;
  f->state = f->chunked || f->left ? MM_FRAMING_BODY : MM_FRAMING_DONE;
  return true;
}

/* One line of the head. */
static size_t read_head_line(mm_framing *f, const char *bytes, size_t n) {
  size_t used = 0;
  mm_text *t = f->method ? &f->head : &f->request;
  const bool whole = take_line(f, t, bytes, n, &used);
  if (f->state == MM_FRAMING_REFUSED) return used;
  if (f->head.n + f->request.n > f->head_max) {
    refuse(f, 431, "the head of the request is too long");
  } else if (whole && !f->method) {
    if (t->n == 0)
      refuse(f, 400, "there is an empty line before the request");
    else
      read_request_line(f, t->p);
  } else if (whole && f->head.n == f->line_at) {
    read_head(f);
  } else if (whole) {
    mm_text_add(t, "", 1);
    f->line_at = t->n;
    if (t->failed) refuse_memory(f);
  }
  return used;
}

/* ---- The body ---- */

/* Whole bytes of the body, as many as are to come. */
static size_t read_bytes(mm_framing *f, const char *bytes, size_t n) {
  const size_t used = (size_t)mm_min(n, f->left);
  mm_text_add(&f->body, bytes, used);
  f->left -= used;
  if (f->body.failed) refuse_memory(f);
  return used;
}

/* 1*HEXDIG [ ";" any ]. Extensions are passed over. */
static bool read_size(mm_framing *f, const char *line) {
  size_t n = 0;
  uint64_t size = 0;
  for (; mm_hex_digit(line[n]) >= 0; n++) size = size >> 59 ? UINT64_MAX >> 1 : 16 * size + (uint64_t)mm_hex_digit(line[n]);
  if (!n || n > SIZE_DIGITS || (line[n] && line[n] != ';')) return refuse(f, 400, "the size of a chunk is not a hexadecimal number");
  if (size > f->body_max - f->body.n) return refuse(f, 413, too_large);
  f->left = size;
  f->extra += strlen(line + n);
  f->part = size ? PART_CHUNK : PART_TRAILER;
  return true;
}

/* A field behind the last chunk: dropped, and none that would say something else about what has been read. */
static bool read_trailer(mm_framing *f, char *line, size_t n) {
  static const char *const head_only[] = {"content-length", "transfer-encoding", "host"};
  mm_http_field field;
  if (!n) {
    f->state = MM_FRAMING_DONE;
    return true;
  }
  f->extra += n;
  if (!read_field(f, line, &field)) return false;
  for (size_t i = 0; i < sizeof head_only / sizeof *head_only; i++)
    if (strcasecmp(field.name, head_only[i]) == 0) return refuse(f, 400, "a trailer has a name that belongs in the head");
  return true;
}

/* A line between or behind chunks. */
static size_t read_chunk_line(mm_framing *f, const char *bytes, size_t n) {
  size_t used = 0;
  if (f->part == PART_CHUNK_END && !f->cr && *bytes != '\r') {
    refuse(f, 400, "there is no CR LF behind a chunk");
    return 0;
  }
  const bool whole = take_line(f, &f->line, bytes, n, &used);
  if (f->state == MM_FRAMING_REFUSED) return used;
  if (f->extra + f->line.n > f->head_max) refuse(f, 431, "chunk extensions and trailers are too long");
  if (f->state == MM_FRAMING_REFUSED || !whole) return used;
  if (f->part == PART_CHUNK_END)
    f->part = PART_SIZE;
  else if (f->part == PART_SIZE)
    read_size(f, f->line.p);
  else
    read_trailer(f, f->line.p, f->line.n);
  mm_text_clear(&f->line);
  return used;
}

static size_t read_part(mm_framing *f, const char *bytes, size_t n) {
  if (f->part != PART_LENGTH && f->part != PART_CHUNK) return read_chunk_line(f, bytes, n);
  const size_t used = read_bytes(f, bytes, n);
  if (f->left || f->state == MM_FRAMING_REFUSED) return used;
  if (f->part == PART_CHUNK)
    f->part = PART_CHUNK_END;
  else
    f->state = MM_FRAMING_DONE;
  return used;
}

/* Of a refused request: logs show the path, and a query may hold what is secret. */
static void cut_query(mm_framing *f) {
  char *query = f->path ? strchr(f->request.p + f->target_at, '?') : NULL;
  if (query) *query = 0;
}

size_t mm_framing_read(mm_framing *f, const char *bytes, size_t n) {
  const bool head = f->state == MM_FRAMING_HEAD;
  size_t used = 0;
  while (head && used < n && f->state == MM_FRAMING_HEAD) used += read_head_line(f, bytes + used, n - used);
  while (!head && used < n && f->state == MM_FRAMING_BODY) used += read_part(f, bytes + used, n - used);
  if (f->state == MM_FRAMING_REFUSED) cut_query(f);
  return used;
}

void mm_framing_late(mm_framing *f) {
  refuse(f, 408, "the request did not arrive whole in the time that this server waits (--read-timeout)");
  cut_query(f);
}

const char *mm_framing_find(const mm_framing *f, const char *name, size_t number) {
  for (size_t i = 0; i < f->fields; i++)
    if (strcasecmp(f->field[i].name, name) == 0 && !number--) return f->field[i].value;
  return NULL;
}

/* Empties t; memory of a long text is given back. */
static void empty(mm_text *t) {
  if (t->cap <= KEPT_MAX && !t->failed) {
    mm_text_clear(t);
    return;
  }
  free(t->p);
  *t = (mm_text){0};
}

void mm_framing_next(mm_framing *f) {
  free(f->field);
  mm_text *const text[] = {&f->request, &f->head, &f->line, &f->body};
  for (size_t i = 0; i < sizeof text / sizeof *text; i++) empty(text[i]);
  *f = (mm_framing){
      .head_max = f->head_max, .body_max = f->body_max, .request = f->request, .head = f->head, .line = f->line, .body = f->body};
}

void mm_framing_close(mm_framing *f) {
  MM_FREE(f->field, f->request.p, f->head.p, f->line.p, f->body.p);
  *f = (mm_framing){0};
}

const char *mm_framing_reason(int status) {
  static const struct {
    int status;
    const char *reason;
  } known[] = {{200, "OK"},
               {204, "No Content"},
               {400, "Bad Request"},
               {401, "Unauthorized"},
               {403, "Forbidden"},
               {404, "Not Found"},
               {405, "Method Not Allowed"},
               {408, "Request Timeout"},
               {413, "Content Too Large"},
               {415, "Unsupported Media Type"},
               {417, "Expectation Failed"},
               {429, "Too Many Requests"},
               {431, "Request Header Fields Too Large"},
               {500, "Internal Server Error"},
               {501, "Not Implemented"},
               {503, "Service Unavailable"},
               {504, "Gateway Timeout"},
               {505, "HTTP Version Not Supported"}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].status == status) return known[i].reason;
  return "";
}
