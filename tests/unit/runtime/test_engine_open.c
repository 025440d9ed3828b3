/* Opening an engine: threads of a process, and models that a backend has no ops for. */
#include "formats/system/pool.h"
#include "runtime/engine/engine.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

/* --devices: a number for each rank, and none on the CPU. Ranks that share a device have hardware queues of their own, unless the
 * environment says how many there are. */
TEST(devices) {
  static const struct {
    const char *list, *before, *after; /* the variable */
  } rows[] = {{"2,0,1", NULL, NULL},    {"0,1,0", NULL, "32"},
              {"7,7,7", "4", "4"},      {"0,0", NULL, NULL},
              {"0,0,0,0", NULL, NULL},  {"0,0,", NULL, NULL},
              {"0", NULL, NULL},        {"", NULL, NULL},
              {",0,0", NULL, NULL},     {"0;1;2", NULL, NULL},
              {"0,1,-1", NULL, NULL},   {"0,1, 2", NULL, NULL},
              {"0,1,1024", NULL, NULL}, {"0,1,18446744073709551617", NULL, NULL}};
  const char *name = "CUDA_DEVICE_MAX_CONNECTIONS";
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mm_err err = {0};
    uint32_t *device = NULL;
    if (rows[i].before)
      setenv(name, rows[i].before, 1);
    else
      unsetenv(name);
    assert_int_equal(mm_devices_read("cuda", rows[i].list, 3, &device, &err), i < 3);
    assert_int_equal(mm_devices_shared(device, 3), i == 1 || i == 2);
    const char *found = getenv(name);
    if (rows[i].after)
      assert_string_equal(found, rows[i].after);
    else
      assert_null(found);
    if (i < 3)
      assert_int_equal(device[0], rows[i].list[0] - '0');
    else
      assert_string_equal(err.code, "E_USAGE");
    free(device);
  }
  unsetenv(name);
}

TEST(threads_of_a_process) {
  const unsigned cpus = mm_pool_cpus();
  assert_int_equal(mm_engine_threads(3, 8), 3);
  assert_int_equal(mm_engine_threads(0, 1), cpus);
  for (uint32_t ranks = 1; ranks <= 64; ranks++) {
    const unsigned each = mm_engine_threads(0, ranks);
    assert_true(each == 1 || each * ranks <= cpus); /* --pin has a CPU for each */
    assert_true((each + 1) * ranks > cpus);
  }
}

static mm_backend *never_opened(const mm_backend_config *c, mm_err *err) {
  (void)c, (void)err;
  fail_msg("the backend was opened");
  return NULL;
}

/* A backend without the ops of extended models, as the CUDA one is, refuses them before it sees a weight; others it is asked to run. */
TEST(unsupported_models) {
  for (int missing = 0; missing < 2; missing++) {
    mm_ops ops = mm_ops_cpu;
    ops.open = never_opened;
    *(missing ? (void **)&ops.mlp : (void **)&ops.select) = NULL;
    const mm_model m2 = ref_dims(MM_FAMILY_M2, false);
    mm_err err = {0};
    assert_true(mm_ops_run(&ops, &m2, &err));
    ref_model ref = ref_build(ref_dims(MM_FAMILY_M3, false));
    ref_shards *shards = ref_cut(&ref, 1);
    const mm_engine_config c = {.ops = &ops, .limits = {.max_tokens = 8, .slots = 1, .max_positions = 8}, .options.threads = 1};
    assert_null(mm_engine_open(&shards->s, &c, &err));
    assert_int_equal(err.status, MM_UNSUPPORTED);
    assert_string_equal(err.code, "E_DEVICE");
    assert_non_null(strstr(err.text, "found device cpu and a model Test, whose sparse attention"));
    ref_uncut(shards);
    ref_free(&ref);
  }
}

/* A backend that keeps no index keys in e4m3 refuses to, and any backend for a model without them. */
TEST(index_keys_in_e4m3) {
  for (int m3 = 0; m3 < 2; m3++) {
    mm_ops ops = mm_ops_cpu;
    ops.open = never_opened;
    ops.cache.index_fp8 = !m3;
    mm_err err = {0};
    ref_model ref = ref_build(ref_dims(m3 ? MM_FAMILY_M3 : MM_FAMILY_M2, false));
    ref_shards *shards = ref_cut(&ref, 1);
    const mm_engine_config c = {
        .ops = &ops, .limits = {.max_tokens = 8, .slots = 1, .max_positions = 8}, .options = {.threads = 1, .index_fp8 = true}};
    assert_null(mm_engine_open(&shards->s, &c, &err));
    assert_int_equal(err.status, MM_UNSUPPORTED);
    assert_non_null(strstr(err.text, m3 ? "device cpu keeps index keys in its own type alone" : "the model has no index keys"));
    ref_uncut(shards);
    ref_free(&ref);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
