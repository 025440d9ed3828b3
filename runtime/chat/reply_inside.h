/* Shared parts of the reply parsers. A reply goes through three steps: bytes become valid UTF-8; markers are separated from text
 * (reply_prose.c); text and markers go to the prose parser (reply_prose.c) or, between the tags around tool calls, to the format's
 * (reply_m1.c, reply_m2.c, chat_m3.c).
 *
 * Within the parser M3's mark is the byte MM_REPLY_MARK, which valid UTF-8 does not have; events have its text. */
#ifndef MM_RUNTIME_REPLY_INSIDE_H
#define MM_RUNTIME_REPLY_INSIDE_H

#include "runtime/chat/elements.h"
#include "runtime/chat/reply.h"
#include "runtime/text/utf8.h"

typedef enum mm_marker { MM_MARK_THINK, MM_MARK_THINK_END, MM_MARK_CALLS, MM_MARK_CALLS_END, MM_MARKERS } mm_marker;

/* States of the parsers of tool calls; each format uses some. */
typedef enum mm_reply_block {
  MM_BLOCK_NONE,  /* in prose */
  MM_BLOCK_START, /* after the opening tag; `shown` is the tag and the white space so far */
  MM_BLOCK_NEXT,  /* before the next call */
  MM_BLOCK_STRAY, /* in text that belongs to no call */
  MM_BLOCK_NAME,  /* M2: in the name of a call */
  MM_BLOCK_PARAMETERS,
  MM_BLOCK_KEY,        /* M2: in the name of a parameter */
  MM_BLOCK_VALUE,      /* M2, M3: in a parameter */
  MM_BLOCK_STRAY_LINE, /* M1: in text that belongs to no call, at the start of a line */
  MM_BLOCK_LINE        /* M1: in a JSON object */
} mm_reply_block;

/* M1: the JSON object of a call. */
typedef struct mm_reply_object {
  unsigned depth;       /* braces and brackets */
  bool quoted, escaped; /* in a string */
  bool ended;           /* the arguments have ended */
  bool tried;           /* it has become a call, or cannot before its end */
  size_t sent;          /* bytes of it that were sent as arguments */
} mm_reply_object;

struct mm_reply {
  mm_reply_settings s;
  const mm_tools *tools; /* the settings' or `own` */
  mm_tools own;
  const char *marker[MM_MARKERS];
  int32_t marker_id[MM_MARKERS]; /* -1: matched by text */
  int32_t mark_id;               /* M3: of the mark; -1: matched by text */
  mm_utf8_stream utf8;
  mm_text bytes; /* scratch: decoded */
  mm_text text;  /* may still be part of a marker */
  uint32_t reasoning_tokens, calls;
  /* Prose. */
  bool reasoning;   /* else content */
  bool fresh;       /* only white space so far, which is in `held` */
  bool silent;      /* no event yet */
  bool quoting;     /* in a <think> that is content: calls are not calls */
  bool append_open; /* append_think: the reasoning is open */
  unsigned lead;    /* newlines at the start that belong to the template */
  mm_text held;     /* white space that may be dropped */
  /* Blocks. */
  mm_reply_block block;
  mm_text shown;     /* the opening tag, until a call follows it */
  bool literal;      /* the tag was sent as content, since no call followed */
  mm_text in;        /* not yet parsed */
  mm_text name, key; /* of the call and parameter at hand */
  mm_text value;     /* M2, M3: of a parameter whose type is not known before its end; M1: the object */
  mm_text raw;       /* M3: the call as it was written */
  mm_text within;    /* M3: names of the open elements in the parameter, each followed by ">" */
  unsigned levels;   /* M3: number of these */
  mm_text given;     /* M2: names of the parameters of the call so far, with a ">" before, between and after them */
  size_t scan;       /* M2: bytes of `in` that were looked at for the end of the value */
  size_t maybe;      /* M2: where the next parameter may begin in `in` without an end of this one; SIZE_MAX: nowhere */
  mm_text fragment;  /* scratch */
  unsigned types;    /* of the parameter */
  bool begun;        /* the call at hand has a parameter */
  bool open;         /* a call is open */
  bool streaming;    /* the parameter is a string and flows */
  mm_reply_object object;
};

/* Sends an event; n is 0 only for MM_REPLY_CALL_END. */
void mm_reply_emit(mm_reply *r, mm_reply_kind kind, const char *text, size_t n);
/* A format's parser of tool calls. */
typedef struct mm_block_parser {
  void (*text)(mm_reply *r);                        /* parses what r->in has gained */
  bool (*marker)(const mm_reply *r, mm_marker m);   /* returns true if this marker is plain text here */
  void (*end)(mm_reply *r, mm_reply_finish finish); /* the block or the reply ends */
} mm_block_parser;
extern const mm_block_parser mm_block_m1, mm_block_m2, mm_block_m3;

/* Parts of arguments that M2 and M3 write into r->fragment: `{"key": ` or `, "key": ` of r->key, and a piece of a string with its
 * first or last quote. mm_block_send makes an event of the fragment. */
void mm_block_key(mm_reply *r);
void mm_block_piece(mm_reply *r, const char *text, size_t n, bool first, bool last);
void mm_block_send(mm_reply *r);
/* The parameter r->key is a string that flows and begins so: sends its key and this text. */
void mm_block_flow(mm_reply *r, const char *text, size_t n);
/* Sends the end of the open call. */
void mm_block_end_call(mm_reply *r);
/* A name as a tag has it, without white space around it and one pair of quotes. */
mm_str mm_block_name(const char *s, size_t n);

/* Removes the first n bytes of r->in. */
void mm_block_drop(mm_reply *r, size_t n);
/* The first n bytes of r->in become content. */
void mm_block_stray(mm_reply *r, size_t n);
/* Shows the opening tag as content, since no call follows it. */
void mm_block_show(mm_reply *r);
/* Bytes of white space at the start of r->in. */
size_t mm_block_space(const mm_reply *r);

#endif
