/* Newline-delimited JSON for programs that watch a conversion: begin, progress, done or failed, each with "time", seconds since 1970. */
#ifndef MM_CONVERT_EVENTS_H
#define MM_CONVERT_EVENTS_H

#include "formats/json.h"
#include "formats/system/output.h"

typedef struct mm_events mm_events;
/* Appends to the file (or pipe) at place->path, by the rule of formats/system/output.h. NULL on failure. */
mm_events *mm_events_open(const mm_output_place *place, mm_err *err);
/* The first line of a file of events: of a run that began, or of one that failed before. */
#define MM_EVENTS_MARKS                                                                                                     \
  {                                                                                                                         \
    {.head = "{\"architecture\":\"", .text = "\"event\":\""}, { .head = "{\"error\":\"E_", .text = "\"event\":\"failed\"" } \
  }
/* One line, in one write; of progress none where a pipe is full, others within 5 s, in which its reader takes some, or not at all;
 * takes `fields` over (NULL: no memory for them), puts "event" and "time" into it. The first failure is kept. Not from two threads at once.
 * Accepts NULL. */
void mm_events_put(mm_events *e, const char *event, mm_json *fields);
/* False when a line could not be written. Accepts NULL. */
MM_MUST_USE bool mm_events_close(mm_events *e, mm_err *err);

#endif
