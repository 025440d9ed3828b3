/* Elements to JSON. */
#include "runtime/chat/elements.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/chat/chat_format.h"

#define TAG  MM_REPLY_MARK
#define GAP  64   /* bytes of white space between the mark and its tag */
#define NAME 4096 /* bytes of a tag's name; a longer one is none */

mm_tag_match mm_element_take(const char *s, size_t n, mm_element_tag *out) {
  size_t at = 1;
  while (at < n && at <= GAP && mm_is_space(s[at])) at++;
  if (at == n) return MM_TAG_PARTIAL;
  if (s[at] != '<') return MM_TAG_NO;
  if (++at == n) return MM_TAG_PARTIAL;
  out->closing = s[at] == '/';
  at += out->closing;
  const size_t most = mm_min(n - at, (size_t)NAME);
  const char *end = memchr(s + at, '>', most), *mark = memchr(s + at, TAG, most);
  if (mark && (!end || mark < end)) return MM_TAG_NO;
  if (!end) return most == NAME ? MM_TAG_NO : MM_TAG_PARTIAL;
  out->name = (mm_str){s + at, (size_t)(end - s) - at};
  out->used = (size_t)(end - s) + 1;
  return MM_TAG_YES;
}

typedef struct element {
  mm_str name, content;
  size_t place;
} element;

typedef struct elements {
  element *item; /* [count] */
  size_t count, cap;
  mm_text text; /* between them, unless it is white space */
} elements;

const char *mm_element_text(const char *s, const char *end) {
  const char *mark = s < end ? memchr(s, TAG, (size_t)(end - s)) : NULL;
  return mark ? mark : end;
}

/* The end of the element whose content begins at s: elements are balanced here. *after: behind its closing tag. */
static const char *end_of_content(const char *s, const char *end, const char **after) {
  for (unsigned level = 1; (s = mm_element_text(s, end)) < end;) {
    mm_element_tag t;
    if (mm_element_take(s, (size_t)(end - s), &t) != MM_TAG_YES) break;
    level += t.closing ? -1u : 1u;
    if (!level) return *after = s + t.used, s;
    s += t.used;
  }
  return *after = end;
}

static bool split(mm_str content, elements *out) {
  const char *s = content.p, *end = s + content.n;
  while (s < end) {
    const char *mark = mm_element_text(s, end);
    bool blank = true;
    for (const char *c = s; c < mark; c++) blank = blank && mm_is_space(*c);
    if (!blank) mm_text_add(&out->text, s, (size_t)(mark - s));
    mm_element_tag t;
    if (mark == end || mm_element_take(mark, (size_t)(end - mark), &t) != MM_TAG_YES) break;
    if (!MM_GROW(out->item, &out->cap, out->count + 1, MM_IGNORED)) return false;
    element *e = &out->item[out->count];
    const char *from = mark + t.used, *to = end_of_content(from, end, &s);
    *e = (element){.name = t.name, .content = {from, (size_t)(to - from)}, .place = out->count++};
  }
  return !out->text.failed;
}

static int by_name(const void *a, const void *b) {
  const element *x = a, *y = b;
  const int order = memcmp(x->name.p, y->name.p, mm_min(x->name.n, y->name.n));
  if (order) return order;
  return x->name.n != y->name.n ? (x->name.n < y->name.n ? -1 : 1) : x->place < y->place ? -1 : x->place > y->place;
}

typedef struct group {
  const element *first; /* [count] of one name */
  size_t count;
} group;

static int by_place(const void *a, const void *b) {
  const group *x = a, *y = b;
  return x->first->place < y->first->place ? -1 : x->first->place > y->first->place;
}

/* The text with its marks written out. */
static void put_written(mm_text *out, mm_str s) {
  mm_text text = {0};
  mm_text_put(&text, "");
  for (const char *end = s.p + s.n, *mark; s.p < end; s.p = mark + (mark < end)) {
    mark = mm_element_text(s.p, end);
    mm_text_add(&text, s.p, (size_t)(mark - s.p));
    if (mark < end) mm_text_put(&text, MM_CHAT_MARK);
  }
  if (!text.failed) mm_text_quote(out, text.p, text.n);
  out->failed |= text.failed;
  free(text.p);
}

static void put_list(mm_text *out, const mm_value *root, const mm_value *items, const element *e, size_t count) {
  mm_text_put(out, "[");
  for (size_t i = 0; i < count; i++) {
    if (i) mm_text_put(out, ", ");
    mm_element_value(out, root, items, e[i].content);
  }
  mm_text_put(out, "]");
}

static bool all_text(const group *g) {
  for (size_t i = 0; i < g->count; i++) {
    const mm_str s = g->first[i].content;
    if (!s.n || memchr(s.p, MM_REPLY_MARK, s.n)) return false;
  }
  return true;
}

static void put_group(mm_text *out, const mm_value *root, const mm_value *schema, const group *g) {
  const unsigned types = mm_schema_types(root, schema);
  const bool list = types & MM_TYPE_ARRAY && !(types & MM_TYPE_STRING) && all_text(g);
  if (g->count > 1 && (!types || list))
    put_list(out, root, types ? mm_schema_items(root, schema) : schema, g->first, g->count);
  else
    mm_element_value(out, root, schema, g->first[g->count - 1].content);
}

/* Groups by name, in the order of their first elements. */
static group *group_by_name(elements *all, size_t *count) {
  group *g = malloc((all->count + 1) * sizeof *g);
  *count = 0;
  if (!g) return NULL;
  if (all->count) qsort(all->item, all->count, sizeof *all->item, by_name);
  for (size_t i = 0; i < all->count; i++) {
    if (!i || !mm_str_equal(all->item[i].name, all->item[i - 1].name)) g[(*count)++] = (group){.first = &all->item[i]};
    g[*count - 1].count++;
  }
  qsort(g, *count, sizeof *g, by_place);
  return g;
}

static void put_object(mm_text *out, const mm_value *root, const mm_value *schema, elements *all) {
  size_t count;
  group *g = group_by_name(all, &count);
  out->failed |= !g;
  if (!g) return;
  mm_text_put(out, "{");
  for (size_t i = 0; i < count; i++) {
    const mm_str name = g[i].first->name;
    if (i) mm_text_put(out, ", ");
    mm_text_quote(out, name.p, name.n);
    mm_text_put(out, ": ");
    put_group(out, root, mm_schema_member(root, schema, name), &g[i]);
  }
  if (all->text.n) {
    mm_text_put(out, count ? ", \"$text\": " : "\"$text\": ");
    mm_text_quote(out, all->text.p, all->text.n);
  }
  mm_text_put(out, "}");
  free(g);
}

void mm_element_value(mm_text *out, const mm_value *root, const mm_value *schema, mm_str content) {
  const unsigned types = mm_schema_types(root, schema), both = MM_TYPE_ARRAY | MM_TYPE_OBJECT;
  if (mm_element_text(content.p, content.p + content.n) == content.p + content.n) {
    mm_arguments_put_element(out, types, content);
    return;
  }
  if (types && !(types & ~(unsigned)(MM_TYPE_STRING | MM_TYPE_NULL))) {
    put_written(out, content);
    return;
  }
  elements all = {0};
  if (!split(content, &all)) out->failed = true;
  const bool item = all.count && mm_str_equal(all.item[0].name, (mm_str){"item", 4});
  const bool list = (types & both) == MM_TYPE_ARRAY || ((types & both) != MM_TYPE_OBJECT && item);
  if (list && !all.text.n)
    put_list(out, root, mm_schema_items(root, schema), all.item, all.count);
  else
    put_object(out, root, schema, &all);
  free(all.item);
  free(all.text.p);
}
