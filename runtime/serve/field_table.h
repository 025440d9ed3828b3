/* Which fields of a request each API serves, refuses or leaves without effect: one table for all. */
#ifndef MM_RUNTIME_SERVE_FIELD_TABLE_H
#define MM_RUNTIME_SERVE_FIELD_TABLE_H

#include "formats/body.h"

typedef enum mm_field_api { MM_FIELDS_CHAT, MM_FIELDS_COMPLETIONS, MM_FIELDS_RESPONSES, MM_FIELDS_MESSAGES, MM_FIELDS_APIS } mm_field_api;

typedef enum mm_field_fate {
  MM_FIELD_UNKNOWN, /* in no API that the table knows: ignored */
  MM_FIELD_SERVED,  /* read elsewhere, by the API's own code */
  MM_FIELD_REFUSED, /* unless its value asks for nothing */
  MM_FIELD_NO_EFFECT
} mm_field_fate;

mm_field_fate mm_field_fate_of(const char *name, mm_field_api api);
/* The body has a field by which an API holds replies to a form. The first such request makes a lexicon of the whole vocabulary, and a form
 * may take long to compile. */
bool mm_field_holds(const mm_value *body);
/* The first member of the body that the API must refuse, NULL: there is none. *instead: what is served for it. */
const mm_value *mm_field_refused(const mm_value *body, mm_field_api api, const char **instead);
/* Entry i in the order of names; NULL behind the last. */
const char *mm_field_name(size_t i);
/* What is served in place of entry i where it is refused; NULL where no API refuses it. */
const char *mm_field_instead(size_t i);

#endif
