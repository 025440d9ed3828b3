/* list_tensors DIR [RANK [NAME]]: the tensors of one rank of a packed checkpoint, or the first numbers of one of them.
 *
 *   cc list_tensors.c $(pkg-config --cflags --libs libminimax) -o list_tensors */
#include <inttypes.h>
#include <minimax.h>
#include <stdio.h>
#include <stdlib.h>

static void print_tensor(const minimax_tensor *t) {
  printf("%s %s\n", t->name, t->scheme);
  for (uint32_t i = 0; i < t->planes; i++) {
    const minimax_plane *p = minimax_plane_at(t, i);
    printf("  %s [", p->suffix[0] ? p->suffix : "codes");
    for (uint32_t d = 0; d < p->dims; d++) printf("%s%" PRIu64, d ? ", " : "", p->shape[d]);
    printf("] %s, byte %" PRIu64 " of %s\n", p->dtype, p->offset, p->file);
  }
}

/* The first row of the rank's first matrix, dequantised. */
static int print_row(const minimax_tensor *t, minimax_error *err) {
  float *row = malloc(t->cols * sizeof *row);
  int status = row ? minimax_unpack(t, 0, 0, 1, row, err) : 8;
  for (uint32_t k = 0; status == 0 && k < t->cols && k < 8; k++) printf("%s%.9g", k ? " " : "", (double)row[k]);
  if (status == 0) printf("\n");
  free(row);
  return status;
}

int main(int argc, char **argv) {
  minimax_error err = {0};
  uint32_t rank = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
  if (argc < 2) {
    fprintf(stderr, "usage: list_tensors DIR [RANK [NAME]]\n");
    return 2;
  }
  minimax_checkpoint *c = minimax_open_ranks(argv[1], &rank, 1, &err);
  const minimax_tensor *t = c && argc > 3 ? minimax_find(c, rank, argv[3]) : NULL;
  int status = c ? 0 : err.status;
  if (c && argc > 3) {
    status = t ? print_row(t, &err) : 2;
  } else if (c) {
    const minimax_info *info = minimax_get_info(c);
    printf("%s %s, tp %u, rank %u: %zu tensors\n", info->architecture, info->quant, info->tp, rank, minimax_tensor_count(c, rank));
    for (size_t i = 0; (t = minimax_tensor_at(c, rank, i)); i++) print_tensor(t);
  }
  if (status != 0) fprintf(stderr, "list_tensors: %s\n", err.status ? err.text : "no such tensor");
  minimax_close(c);
  return status;
}
