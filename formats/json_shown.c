/* The words in which an error line shows a JSON value. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/json.h"

#define ENTRIES 8 /* of a list or an object that are shown; of more their number */

const char *mm_json_shown(const mm_json *j, char out[MM_JSON_SHOWN]) {
  static const char *const name[] = {"null", "a boolean", "an integer", "a real number", "a string", "a list", "an object"};
  const mm_json_type t = mm_json_type_of(j);
  char *text = NULL;
  if (j && mm_json_size(j) <= ENTRIES && mm_json_str_len(j) < MM_JSON_SHOWN) text = mm_json_dump(j, false);
  if (text && strlen(text) < MM_JSON_SHOWN)
    snprintf(out, MM_JSON_SHOWN, "%s", text);
  else if (t == MM_JSON_ARR || t == MM_JSON_OBJ)
    snprintf(out, MM_JSON_SHOWN, "%s of %zu", name[t], mm_json_size(j));
  else
    snprintf(out, MM_JSON_SHOWN, "%s", j ? name[t] : "nothing");
  free(text);
  return out;
}
