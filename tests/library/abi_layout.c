/* Prints where every field of minimax.h's structs lies; compiled with the header as it was first published under this soname and with the
 * header of today, the lines of the old one must still be true. */
#include <minimax.h>
#include <stdio.h>

#define FIELD(s, f) printf(#s "." #f " %zu %zu\n", offsetof(s, f), sizeof(((s *)0)->f))

int main(void) {
  printf("minimax_error %zu\nminimax_grid %zu\n", sizeof(minimax_error), sizeof(minimax_grid)); /* made by callers: they never grow */
  FIELD(minimax_error, status);
  FIELD(minimax_error, code);
  FIELD(minimax_error, text);
  FIELD(minimax_info, dir);
  FIELD(minimax_info, tool);
  FIELD(minimax_info, quant);
  FIELD(minimax_info, architecture);
  FIELD(minimax_info, plan);
  FIELD(minimax_info, tp);
  FIELD(minimax_info, ep);
  FIELD(minimax_info, pp);
  FIELD(minimax_info, ranks);
  FIELD(minimax_info, layers);
  FIELD(minimax_info, hidden);
  FIELD(minimax_info, vocab);
  FIELD(minimax_info, experts);
  FIELD(minimax_info, top_k);
  FIELD(minimax_info, intermediate);
  FIELD(minimax_info, heads);
  FIELD(minimax_info, kv_heads);
  FIELD(minimax_info, head_dim);
  FIELD(minimax_plane, name);
  FIELD(minimax_plane, suffix);
  FIELD(minimax_plane, dtype);
  FIELD(minimax_plane, data);
  FIELD(minimax_plane, bytes);
  FIELD(minimax_plane, dims);
  FIELD(minimax_plane, shape);
  FIELD(minimax_plane, cell);
  FIELD(minimax_plane, file);
  FIELD(minimax_plane, offset);
  FIELD(minimax_piece, source);
  FIELD(minimax_piece, rows);
  FIELD(minimax_piece, local_at);
  FIELD(minimax_piece, local_rows);
  FIELD(minimax_piece, axis);
  FIELD(minimax_piece, at);
  FIELD(minimax_piece, from);
  FIELD(minimax_piece, count);
  FIELD(minimax_tensor, name);
  FIELD(minimax_tensor, scheme);
  FIELD(minimax_tensor, rank);
  FIELD(minimax_tensor, stage);
  FIELD(minimax_tensor, vector);
  FIELD(minimax_tensor, matrices);
  FIELD(minimax_tensor, first_matrix);
  FIELD(minimax_tensor, whole_matrices);
  FIELD(minimax_tensor, rows);
  FIELD(minimax_tensor, cols);
  FIELD(minimax_tensor, whole_cols);
  FIELD(minimax_tensor, planes);
  FIELD(minimax_tensor, pieces);
  FIELD(minimax_tensor, input_scale);
  FIELD(minimax_grid, dtype);
  FIELD(minimax_grid, suffix);
  FIELD(minimax_grid, lines);
  FIELD(minimax_grid, width);
  FIELD(minimax_grid, cell);
  FIELD(minimax_grid, bytes);
  return 0;
}
