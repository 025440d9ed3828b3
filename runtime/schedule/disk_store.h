/* Copies of places of the host pool in a file, made by threads of its own. The file has no name: nobody else opens it, and it is gone with
 * the process. */
#ifndef MM_RUNTIME_DISK_STORE_H
#define MM_RUNTIME_DISK_STORE_H

#include "formats/system/base.h"

typedef struct mm_disk_store mm_disk_store;

/* The part that one rank has of the host pool: place p is at memory + p · bytes. */
typedef struct mm_pool_part {
  char *memory;
  uint64_t bytes;
} mm_pool_part;

/* A place is written to a block of the file, or read from there. */
typedef struct mm_disk_move {
  uint32_t place, block;
  bool in; /* to the place */
} mm_disk_move;

/* A move that has ended. */
typedef struct mm_disk_end {
  mm_disk_move move;
  bool ok;
} mm_disk_end;

/* A file of so many blocks, each as large as all parts of a place, in a folder that exists; it takes space as blocks are written. */
mm_disk_store *mm_disk_store_open(const char *dir, uint32_t blocks, const mm_pool_part *part, uint32_t parts, mm_err *err);
void mm_disk_store_close(mm_disk_store *d); /* accepts NULL; drops moves that have not begun */
/* Queues moves; reads come before writes. The caller leaves their places and blocks alone until they have ended. */
MM_MUST_USE bool mm_disk_store_move(mm_disk_store *d, const mm_disk_move *move, uint32_t count, mm_err *err);
/* What to wait for first, for MM_DISK_WAIT_S at most: nothing; until no read is left; until some move has ended. */
typedef enum mm_disk_wait { MM_DISK_NOW, MM_DISK_READS, MM_DISK_ANY } mm_disk_wait;
#define MM_DISK_WAIT_S 0.05
/* end[returned ≤ most]: moves that have ended since. A move that failed left nothing good in its place
 * or block, and *why says why, of the last of them: E_DIGEST for a block that is not what was written. */
uint32_t mm_disk_store_ended(mm_disk_store *d, mm_disk_wait wait, mm_disk_end *end, uint32_t most, mm_err *reason);

#endif
