/* convert/hf: a source that is whole is read whatever its files and names; every broken one is refused with its
 * status and a line that names file and tensor. The rows' marks (B01 …, D01 …) are those of the fault catalogue. */
#include <fcntl.h>
#include <limits.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include "convert/source/index.h"
#include "tests/unit/convert/source.h"

static const char shard1[] = "src/model-00001-of-00002.safetensors", shard2[] = "src/model-00002-of-00002.safetensors";

#define REFUSED(depth_, row, code, says) src_refused(s, (src_options){.depth = (depth_)}, row, MM_BAD_INPUT, code, says)
#define ACCEPTED(row)                    src_accepted(s, (src_options){.depth = SRC_READ}, row)

TEST(test_whole) {
  FRESH(s) {
    src_write(s);
    ACCEPTED("whole");
    src_accepted(s, (src_options){SRC_READ, "bf16", false}, "whole, bf16");
  }
  /* The index may name model.safetensors too. */
  FRESH(s) {
    s->file[0] = "model.safetensors";
    for (size_t i = 0; i < s->count; i++) s->t[i].file = s->file[s->t[i].shard];
    src_write(s);
    ACCEPTED("an index of model.safetensors and another");
  }
  /* Files that the index does not name are nobody's business, nor is their count in the names. */
  FRESH(s) {
    src_write(s);
    put_file(src_path(s, "src/other.safetensors"), "junk", 4);
    ACCEPTED("a stranger");
  }
}

/* B02, B03 */
TEST(test_wrong_files) {
  static const char *const not_st[] = {"config.json", MM_INDEX_NAME};
  for (size_t i = 0; i < 2; i++) {
    FRESH(s) {
      src_find(s, "lm_head.weight")->file = not_st[i];
      src_find(s, "lm_head.weight")->shard = -1;
      src_write(s);
      REFUSED(SRC_OPEN, "B02", "E_NOT_ST", not_st[i]);
    }
  }
  FRESH(s) {
    src_write(s);
    unlink(src_path(s, shard2));
    REFUSED(SRC_OPEN, "B03", "E_FS_MISSING", shard2);
  }
  static const char *const unfinished[] = {".incomplete", ".part"};
  for (size_t i = 0; i < 2; i++) {
    FRESH(s) {
      char part[64];
      snprintf(part, sizeof part, "%s%s", shard2, unfinished[i]);
      src_write(s);
      src_move(s, shard2, part);
      REFUSED(SRC_OPEN, "B03", "E_FS_MISSING", "download seems unfinished");
      REFUSED(SRC_OPEN, "B03", "E_FS_MISSING", unfinished[i]);
    }
  }
  FRESH(s) {
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    src_write(s);
    put_file(src_path(s, shard1), pointer, strlen(pointer));
    REFUSED(SRC_OPEN, "A06", "E_NOT_ST", "git lfs pull");
    put_file(src_path(s, shard1), "", 0);
    REFUSED(SRC_OPEN, "A01", "E_PREFIX", shard1);
    put_file(src_path(s, shard2), pointer, strlen(pointer));
    for (int i = 0; i < 100; i++) REFUSED(SRC_OPEN, "A01", "E_PREFIX", shard1); /* the first of two, whatever thread is first */
  }
}

/* B04: what the index says of a tensor and what its file holds. Both file names are in the line. */
TEST(test_tensor_places) {
  FRESH(s) {
    src_find(s, "lm_head.weight")->shard = -1;
    src_write(s);
    REFUSED(SRC_OPEN, "B04 absent", "E_IDX_TENSOR", "tensor \"lm_head.weight\": found in the index, but not in this file");
  }
  for (int twice = 0; twice < 2; twice++) {
    FRESH(s) {
      src_tensor *t = src_find(s, "lm_head.weight");
      if (twice) {
        src_tensor *copy = src_add(s, "lm_head.weight", "BF16", 2, VOCAB, HIDDEN);
        copy->shard = 1 - t->shard;
        copy->file = NULL;
      } else {
        t->file = s->file[1 - t->shard];
      }
      src_write(s);
      REFUSED(SRC_OPEN, "B04 elsewhere or twice", "E_DUP_TENSOR", "lm_head.weight");
      REFUSED(SRC_OPEN, "B04", "E_DUP_TENSOR", s->file[0]);
      REFUSED(SRC_OPEN, "B04", "E_DUP_TENSOR", s->file[1]);
    }
  }
  FRESH(s) {
    src_find(s, "lm_head.weight")->file = NULL;
    src_write(s);
    REFUSED(SRC_OPEN, "B04 not listed", "E_IDX_TENSOR", "found in this file, but not in the index, expected in both");
  }
  /* Two names of one tensor. */
  FRESH(s) {
    src_add(s, "model.layers.0.mlp.gate.weight", "F32", 2, EXPERTS, HIDDEN);
    src_write(s);
    REFUSED(SRC_OPEN, "two spellings", "E_DUP_TENSOR", "model.layers.0.mlp.gate.weight");
  }
  FRESH(s) {
    src_add(s, SRC_MOE "experts.2.gate_proj.weight", "F8_E4M3", 2, INTER, HIDDEN);
    src_write(s);
    REFUSED(SRC_OPEN, "two spellings", "E_DUP_TENSOR", "experts.2.w1.weight");
  }
}

/* Experts by their own names, all in one stack, or some both ways. */
TEST(test_fused) {
  for (int first = 0; first <= EXPERTS; first++) { /* experts below `first` keep their own tensors */
    FRESH(s) {
      src_shape(src_add(s, SRC_MOE "experts.w13_weight", "F8_E4M3", 1, 1, 0), "F8_E4M3", 3, EXPERTS, 2 * INTER, HIDDEN);
      src_shape(src_add(s, SRC_MOE "experts.w13_weight_scale_inv", "F32", 1, 1, 0), "F32", 3, EXPERTS, 2, 1);
      for (int e = first; e < EXPERTS; e++) {
        for (int w = 1; w <= 3; w += 2) {
          char name[64];
          snprintf(name, sizeof name, "experts.%d.w%d.weight", e, w);
          src_remove(s, name);
          snprintf(name, sizeof name, "experts.%d.w%d.weight_scale_inv", e, w);
          src_remove(s, name);
        }
      }
      src_write(s);
      if (first == 0)
        ACCEPTED("a stack");
      else
        REFUSED(SRC_PLAN, "by name and in a stack", "E_DUP_TENSOR", "experts.w13_weight");
    }
  }
  FRESH(s) { /* one row too many in the stack */
    src_shape(src_add(s, SRC_MOE "experts.w2_weight", "F8_E4M3", 1, 1, 0), "F8_E4M3", 3, EXPERTS, HIDDEN + 1, INTER);
    for (int e = 0; e < EXPERTS; e++) {
      char name[64];
      snprintf(name, sizeof name, "experts.%d.w2.weight", e);
      src_remove(s, name);
      snprintf(name, sizeof name, "experts.%d.w2.weight_scale_inv", e);
      src_remove(s, name);
    }
    src_write(s);
    REFUSED(SRC_PLAN, "stack of another shape", "E_SHAPE", "found shape [3, 11, 6], expected [3, 10, 6]");
  }
}

/* Puts everything into one file without an index. */
static void one_file(source *s) {
  for (size_t i = 0; i < s->count; i++) s->t[i].shard = 0;
  s->file[0] = "model.safetensors";
  s->file_count = 1;
  s->index = "";
}

/* B08 */
TEST(test_ambiguous) {
  FRESH(s) {
    src_write(s);
    src_write_shard(s, 0, src_path(s, "src/model.safetensors"));
    REFUSED(SRC_OPEN, "B08", "E_AMBIGUOUS", MM_INDEX_NAME);
    REFUSED(SRC_OPEN, "B08", "E_AMBIGUOUS", "model.safetensors");
  }
  FRESH(s) {
    s->index = "";
    src_write(s);
    REFUSED(SRC_OPEN, "neither", "E_FS_MISSING", "model.safetensors");
  }
  FRESH(s) {
    one_file(s);
    src_write(s);
    ACCEPTED("one file");
    src_link(s, "nothing", "src/" MM_INDEX_NAME); /* which is not "no index" */
    REFUSED(SRC_OPEN, "dangling index", "E_FS_MISSING", MM_INDEX_NAME);
  }
}

enum { AS_FIFO, AS_DIRECTORY, AS_SOCKET, AS_LOOP, AS_DANGLING, AS_DEVICE };

/* Puts something else where a file was. */
static void instead(const source *s, const char *name, int what) {
  const char *path = src_path(s, name);
  assert_int_equal(unlink(path), 0);
  if (what == AS_FIFO) assert_int_equal(mkfifo(path, 0600), 0);
  if (what == AS_DIRECTORY) assert_int_equal(mkdir(path, 0700), 0);
  if (what == AS_LOOP) src_link(s, strrchr(path, '/') + 1, name);
  if (what == AS_DANGLING) src_link(s, "nothing", name);
  if (what == AS_DEVICE) src_link(s, "/dev/zero", name);
  if (what == AS_SOCKET) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(a.sun_path, sizeof a.sun_path, "%.100s", path);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    close(fd);
  }
}

/* B09, B10, B11: none of it may hang or be read. */
TEST(test_file_types) {
  static const char *const at[] = {shard1, "src/config.json", "src/" MM_INDEX_NAME};
  static const struct {
    const char *row, *code, *says;
  } expected[] = {[AS_FIFO] = {"B09", "E_FS_TYPE", "a FIFO"},
                  [AS_DIRECTORY] = {"B10", "E_FS_TYPE", "a directory"},
                  [AS_SOCKET] = {"B10", "E_FS_TYPE", "a socket"},
                  [AS_LOOP] = {"B11", "E_FS_TYPE", "a loop of symbolic links"},
                  [AS_DANGLING] = {"B11", "E_FS_MISSING", "a symbolic link to nothing"},
                  [AS_DEVICE] = {"B10", "E_FS_TYPE", "a device"}};
  for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
    for (int what = AS_FIFO; what <= AS_DEVICE; what++) {
      FRESH(s) {
        src_write(s);
        instead(s, at[i], what);
        for (int part = 0; part < 2; part++)
          src_refused(s, (src_options){.outside = true}, expected[what].row, MM_BAD_INPUT, expected[what].code,
                      part ? at[i] : expected[what].says);
      }
    }
  }
}

/* Moves root/src to the layout of the Hub's cache: root/snapshots/rev/NAME -> ../../blobs/N, and makes src a link to it. */
static void to_hub(const source *s) {
  assert_int_equal(mkdir(src_path(s, "snapshots"), 0755), 0);
  assert_int_equal(mkdir(src_path(s, "blobs"), 0755), 0);
  src_move(s, "src", "snapshots/rev");
  struct dirent **entry;
  int n = scandir(src_path(s, "snapshots/rev"), &entry, NULL, alphasort);
  for (int i = 0; i < n; i++) {
    char from[512], to[64];
    snprintf(from, sizeof from, "snapshots/rev/%s", entry[i]->d_name);
    snprintf(to, sizeof to, "../../blobs/%d", i);
    if (entry[i]->d_name[0] != '.') {
      src_move(s, from, to + strlen("../../"));
      src_link(s, to, from);
    }
    free(entry[i]);
  }
  free(entry);
  src_link(s, "snapshots/rev", "src");
}

/* Moves a file of the source to root/folder/NAME and leaves a link. */
static void move_out(const source *s, const char *name, const char *folder) {
  char to[256];
  snprintf(to, sizeof to, "../%s/%s", folder, strrchr(name, '/') + 1);
  if (access(src_path(s, folder), F_OK) != 0) assert_int_equal(mkdir(src_path(s, folder), 0755), 0);
  src_move(s, name, to + strlen("../"));
  src_link(s, to, name);
}

/* B12, B14 and A34: links. */
TEST(test_links) {
  FRESH(s) {
    src_write(s);
    to_hub(s);
    ACCEPTED("B12");
    char to[128];
    ssize_t n = readlink(src_path(s, shard1), to, sizeof to - 1);
    assert_true(n > 6);
    to[n] = 0;
    assert_int_equal(mkdir(src_path(s, "blobs2"), 0755), 0); /* next to the store, not in it */
    src_move(s, to + strlen("../../"), "blobs2/x");
    assert_int_equal(unlink(src_path(s, shard1)), 0);
    src_link(s, "../../blobs2/x", shard1);
    REFUSED(SRC_OPEN, "B14", "E_FS_OUTSIDE", "blobs2/x");
  }
  FRESH(s) {
    src_write(s);
    src_move(s, shard1, "src/real");
    src_link(s, "real", shard1);
    ACCEPTED("a link inside");
    assert_int_equal(link(src_path(s, shard2), src_path(s, "src/again")), 0);
    ACCEPTED("A34 hard link");
  }
  /* A folder whose name begins like the checkpoint's is outside; config and index are files of the checkpoint as well. */
  static const struct {
    const char *name, *folder;
  } out[] = {{shard1, "else"}, {shard2, "src2"}, {"src/config.json", "else"}, {"src/" MM_INDEX_NAME, "else"}};
  for (size_t i = 0; i < sizeof out / sizeof *out; i++) {
    FRESH(s) {
      src_write(s);
      move_out(s, out[i].name, out[i].folder);
      REFUSED(SRC_OPEN, "B14", "E_FS_OUTSIDE", out[i].folder);
      REFUSED(SRC_OPEN, "B14", "E_FS_OUTSIDE", "--allow-outside-links");
      src_accepted(s, (src_options){.depth = SRC_READ, .outside = true}, "B14 allowed");
    }
  }
}

/* B16: one descriptor after the other, whatever the number of files. */
TEST(test_descriptors) {
  source *s = src_open();
  static char names[300][16];
  s->file_count = 0;
  src_write(s); /* config and an index to be replaced */
  s->file_count = 2;
  for (int i = 0; i < 300; i++) snprintf(names[i], sizeof names[i], "m-%d", i);
  for (size_t i = 0; i < s->count; i++) s->t[i].shard = (int)i;
  for (size_t i = 0; i < s->count; i++) {
    char path[32];
    snprintf(path, sizeof path, "src/%s", names[i]);
    src_write_shard(s, (int)i, src_path(s, path));
  }
  for (size_t i = s->count; i < 300; i++) { /* the others hold layers past the last */
    char text[256], path[32];
    int n = snprintf(text + 8, sizeof text - 8, "{\"model.layers.%zu.x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", i);
    memcpy(text, &(uint64_t){(uint64_t)n}, 8);
    snprintf(path, sizeof path, "src/%s", names[i]);
    put_file(src_path(s, path), text, (size_t)n + 9);
  }
  FILE *f = fopen(src_path(s, "src/" MM_INDEX_NAME), "wb");
  fputs("{\"weight_map\":{", f);
  for (size_t i = 0; i < 300; i++)
    if (i < s->count)
      fprintf(f, "\"%s\":\"%s\",", s->t[i].name, names[i]);
    else
      fprintf(f, "\"model.layers.%zu.x\":\"%s\"%s", i, names[i], i < 299 ? "," : "}}");
  fclose(f);
  struct rlimit few = {64, 64}, before;
  getrlimit(RLIMIT_NOFILE, &before);
  few.rlim_max = before.rlim_max;
  setrlimit(RLIMIT_NOFILE, &few);
  ACCEPTED("B16");
  setrlimit(RLIMIT_NOFILE, &before);
  src_close(s);
}

/* B15: permissions; for root they do not exist (tests/cli/convert_hostile.py drops them). */
TEST(test_permissions) {
  if (geteuid() == 0) {
    print_message("root may read everything\n");
    skip();
  }
  FRESH(s) {
    src_write(s);
    chmod(src_path(s, shard1), 0);
    src_refused(s, (src_options){0}, "B15", MM_IO, "E_IO", shard1);
    chmod(src_path(s, "src"), 0);
    src_refused(s, (src_options){0}, "B15", MM_IO, "E_IO", "src/config.json");
    chmod(src_path(s, "src"), 0755);
  }
}

/* A33: the files are the same at the end as at the beginning. */
TEST(test_changed) {
  static const char *const touched[] = {shard1, shard2, "src/config.json", "src/" MM_INDEX_NAME};
  for (size_t i = 0; i < sizeof touched / sizeof *touched; i++) {
    source *s = src_open();
    mm_hf hf;
    mm_err err = {0};
    src_write(s);
    char dir[128];
    snprintf(dir, sizeof dir, "%s", src_path(s, "src"));
    assert_true(mm_hf_open(&hf, dir, &(mm_hf_options){0}, &err));
    assert_true(mm_hf_unchanged(&hf, &err));
    struct timespec now[2] = {{0, UTIME_NOW}, {1000000000, 5}};
    assert_int_equal(utimensat(AT_FDCWD, src_path(s, touched[i]), now, 0), 0);
    if (mm_hf_unchanged(&hf, &err)) fail_msg("%s was written to, and nobody saw it", touched[i]);
    assert_int_equal(err.status, MM_IO);
    assert_string_equal(err.code, "E_CHANGED");
    assert_non_null(strstr(err.text, touched[i]));
    mm_hf_close(&hf);
    src_close(s);
  }
}

/* C01: the text of config.json; C14: its quantization. */
TEST(test_config_text) {
  static const char *const bad[][2] = {{"", "E_JSON"},
                                       {"{\"hidden_size\":1", "E_JSON"},
                                       {"{\"hidden_size\":NaN}", "E_JSON"},
                                       {"{\"hidden_size\":1e999}", "E_NUMBER"},
                                       {"{\"hidden_size\":9223372036854775808}", "E_NUMBER"},
                                       {"{\"hidden_size\":1,\"hidden_size\":1}", "E_JSON"},
                                       {"{\"hidden_size\":1} x", "E_JSON"},
                                       {"[1]", "E_CFG_TYPE"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    FRESH(s) {
      snprintf(s->config, sizeof s->config, "%s", bad[i][0]);
      src_write(s);
      REFUSED(SRC_PLAN, bad[i][0], bad[i][1], "src/config.json");
    }
  }
  FRESH(s) {
    src_write(s);
    unlink(src_path(s, "src/config.json"));
    REFUSED(SRC_OPEN, "C01", "E_FS_MISSING", "src/config.json");
  }
}

/* C14 */
TEST(test_quantization_config) {
  static const src_case quant[] = {
      {"{\"quant_method\":\"hqq\",\"weight_block_size\":[128,128]}", MM_UNSUPPORTED, "E_Q_METHOD", "found quant_method \"hqq\""},
      {"{\"quant_method\":\"f\\u001bp8\"}", MM_UNSUPPORTED, "E_Q_METHOD", "f\\x1bp8"},
      {"{\"quant_method\":\"fp8\"}", MM_BAD_INPUT, "E_Q_CONFIG", "no weight_block_size in "},
      {"{\"weight_block_size\":[128,128]}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"quant_method\": found nothing"},
      {"{\"quant_method\":8,\"weight_block_size\":[128,128]}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"quant_method\""},
      {"{\"quant_method\":\"fp8\",\"weight_block_size\":[0,0]}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"weight_block_size\""},
      {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128]}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"weight_block_size\""},
      {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128,128]}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"weight_block_size\""},
      {"{\"quant_method\":\"fp8\",\"weight_block_size\":128}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"weight_block_size\""},
      {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128,-128]}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"weight_block_size\""},
      {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128.0,128]}", MM_BAD_INPUT, "E_Q_CONFIG", "key \"weight_block_size\""},
      {"{\"quant_method\":\"fp8\",\"weight_block_size\":[1099511627776,1099511627776]}", MM_BAD_INPUT, "E_Q_CONFIG",
       "key \"weight_block_size\""},
      {"\"fp8\"", MM_BAD_INPUT, "E_Q_CONFIG", "key \"quantization_config\""},
      {"null", MM_BAD_INPUT, "E_Q_CONFIG", "no quantization_config in "},
  };
  for (size_t i = 0; i < sizeof quant / sizeof *quant; i++)
    FRESH(s) src_refuses(s, "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}", "", SRC_PLAN, &quant[i]);
}

/* C04, C09, C10: counts that the headers do not prove, whether or not there is a tensor that contradicts them, cost neither memory nor
 * time. */
TEST(test_unproved_numbers) {
  clock_t start = clock();
  static const char *const experts[] = {"4", "512", "1024", "1025", "2147483647"};
  for (size_t i = 0; i < sizeof experts / sizeof *experts; i++) {
    for (int gate = 0; gate < 2; gate++) {
      FRESH(s) {
        src_config(s, "\"num_local_experts\":3", "\"num_local_experts\":%s", experts[i]);
        src_config(s, "\"num_hidden_layers\":1", "\"num_hidden_layers\":100");
        if (!gate) {
          src_remove(s, "gate.weight");
          src_remove(s, "e_score_correction_bias");
        }
        src_write(s);
        if (i > 2)
          REFUSED(SRC_PLAN, experts[i], "E_CFG_RANGE", "expected 1 to 1024");
        else
          REFUSED(SRC_PLAN, experts[i], gate ? "E_SHAPE" : "E_MISSING", "gate.weight");
      }
    }
  }
  FRESH(s) {
    src_config(s, "\"num_hidden_layers\":1", "\"num_hidden_layers\":3");
    src_write(s);
    REFUSED(SRC_PLAN, "C10", "E_MISSING", "tensor \"model.layers.1.input_layernorm.weight\": found no such tensor (and 37 more");
  }
  double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
  if (seconds > 15) fail_msg("C04: %.1f s to refuse", seconds);
}

int main(void) { return run_unit_tests(NULL, NULL); }
