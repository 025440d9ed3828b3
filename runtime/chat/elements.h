/* Values as elements, as M3's calls have them: text, or tags around values. The mark before a tag is the byte MM_REPLY_MARK. */
#ifndef MM_RUNTIME_ELEMENTS_H
#define MM_RUNTIME_ELEMENTS_H

#include "runtime/chat/arguments.h"

/* Valid UTF-8 does not have this byte. */
#define MM_REPLY_MARK '\xff'

typedef enum mm_tag_match { MM_TAG_NO, MM_TAG_PARTIAL, MM_TAG_YES } mm_tag_match;

typedef struct mm_element_tag {
  bool closing;
  mm_str name; /* up to ">", may be empty */
  size_t used; /* bytes of the mark and the tag */
} mm_element_tag;

/* The tag at the mark that s begins with, with white space between them: yes, no, or not enough text yet. */
mm_tag_match mm_element_take(const char *s, size_t n, mm_element_tag *out);
/* The first mark from s on, or `end`. */
const char *mm_element_text(const char *s, const char *end);

/* Adds the JSON value of an element's balanced content by its schema within the document `root`. Text is a value as
 * mm_arguments_put_element says. Elements are a list or an object as the schema says; where it does not say, a list if the first one is
 * an `item`; where it allows a string alone they are text as written. Elements of a list have any name. Text between the elements is the
 * member "$text". Several elements of one name are a list if the schema names no type, or a list and no string and they are text;
 * otherwise the last counts. */
void mm_element_value(mm_text *out, const mm_value *root, const mm_value *schema, mm_str content);

#endif
